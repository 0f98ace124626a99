"""How requests are placed: one policy per file, chosen by name."""

from enum import StrEnum

from halfmoon.scheduling.contract import Policy
from halfmoon.scheduling.policies.prefix_affinity import PrefixAffinity
from halfmoon.scheduling.policies.round_robin import RoundRobin

__all__ = ["PolicyName", "PrefixAffinity", "RoundRobin", "policy_named"]


class PolicyName(StrEnum):
    PREFIX_AFFINITY = "prefix_affinity"
    ROUND_ROBIN = "round_robin"


def policy_named(name: PolicyName) -> Policy:
    match name:
        case PolicyName.PREFIX_AFFINITY:
            return PrefixAffinity()
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
