"""Eviction policies: the protocol, and the ones there are."""

from octavo_kvcache._src.policy import (
    LATEST,
    CostAware,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Packed,
    PriorityThenRecency,
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
    "Packed",
    "PriorityThenRecency",
    "Use",
    "named_policy",
]
