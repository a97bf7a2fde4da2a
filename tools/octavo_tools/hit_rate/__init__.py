"""How much of a trace's prompts a prefix cache serves, by the size of its pool.

`trace` reads requests, `stores` simulates caches in plain Python, `policies` says which block goes, `optimum` knows the future, `rows`
lists what is compared and prints it. The simulators are the oracle of the jitted cache: a cache takes part by
implementing `PrefixStore` and standing in `rows.ROWS`.
"""

from octavo_tools.hit_rate.optimum import FarthestNextUse, ToldWhetherAgain
from octavo_tools.hit_rate.policies import POLICIES, Policy, Use
from octavo_tools.hit_rate.rows import ROWS, Row, main, replay
from octavo_tools.hit_rate.stores import BlockChain, PrefixStore, RadixStore, WholePrompts
from octavo_tools.hit_rate.trace import Prompt, Trace, TraceError, read_trace

__all__ = [
    "POLICIES",
    "ROWS",
    "BlockChain",
    "FarthestNextUse",
    "Policy",
    "PrefixStore",
    "Prompt",
    "RadixStore",
    "Row",
    "ToldWhetherAgain",
    "Trace",
    "TraceError",
    "Use",
    "WholePrompts",
    "main",
    "read_trace",
    "replay",
]
