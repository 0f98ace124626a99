"""How requests are placed: one policy per file, chosen by name."""

from halfmoon.conductor.config import PolicyName
from halfmoon.conductor.policies.prefix_affinity import PrefixAffinity
from halfmoon.conductor.policies.round_robin import RoundRobin
from halfmoon.conductor.policy import Policy

__all__ = ["PrefixAffinity", "RoundRobin", "policy_named"]


def policy_named(name: PolicyName) -> Policy:
    match name:
        case PolicyName.PREFIX_AFFINITY:
            return PrefixAffinity()
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
