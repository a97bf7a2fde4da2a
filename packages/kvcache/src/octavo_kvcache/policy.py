"""Eviction policies: the protocol, the ones there are, and a check for others."""

from octavo_kvcache._src.check_policy import check_policy
from octavo_kvcache._src.policy import (
    LATEST,
    CostAware,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Now,
    Packed,
    PriorityThenRecency,
    TwoLifetimes,
    Use,
    named_policy,
)

__all__ = [
    "LATEST",
    "CostAware",
    "EvictionPolicy",
    "FirstInFirstOut",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "Now",
    "Packed",
    "PriorityThenRecency",
    "TwoLifetimes",
    "Use",
    "check_policy",
    "named_policy",
]
