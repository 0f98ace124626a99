"""How requests are placed: one policy per file, chosen by name."""

from enum import StrEnum

from halfmoon.scheduling.contract import Policy
from halfmoon.scheduling.policies.balance import Balance
from halfmoon.scheduling.policies.kv_centric import KvCentric
from halfmoon.scheduling.policies.least_loaded import LeastLoaded
from halfmoon.scheduling.policies.prefix_affinity import PrefixAffinity
from halfmoon.scheduling.policies.random import Random
from halfmoon.scheduling.policies.round_robin import RoundRobin

__all__ = [
    "Balance",
    "KvCentric",
    "LeastLoaded",
    "PolicyName",
    "PrefixAffinity",
    "Random",
    "RoundRobin",
    "policy_named",
]


class PolicyName(StrEnum):
    KV_CENTRIC = "kv_centric"
    PREFIX_AFFINITY = "prefix_affinity"
    LEAST_LOADED = "least_loaded"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"


def policy_named(name: PolicyName, *, balancing_threshold: float | None = None) -> Policy:
    """A policy of its own for each user. `balancing_threshold`: fixed, for `kv_centric`; None: it tunes itself."""
    match name:
        case PolicyName.KV_CENTRIC:
            return KvCentric(Balance(balancing_threshold))
        case PolicyName.PREFIX_AFFINITY:
            return PrefixAffinity()
        case PolicyName.LEAST_LOADED:
            return LeastLoaded()
        case PolicyName.RANDOM:
            return Random()
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
