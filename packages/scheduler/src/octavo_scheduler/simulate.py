"""The scheduler that serves, replaying a trace: what a setting would do, before anybody waits for it.

`read_trace` reads requests, `fit` a cost model from a step log; `simulate` replays a trace on a `Setup` and answers an `Outcome`, `sweep` does
so for a grid of settings. `Simulator` is the machinery: pure functions of a `World` around any scheduler and cache. The command is
`octavo simulate`.
"""

from octavo_scheduler._src.sim_bench import Steady
from octavo_scheduler._src.sim_cache import CountingCache
from octavo_scheduler._src.sim_cluster import ROUTES, Cluster, ClusterOutcome, ClusterSpec, TierSpec
from octavo_scheduler._src.sim_cost import CostModel, Fit, StepSize, fit, size_of
from octavo_scheduler._src.sim_loop import Simulator
from octavo_scheduler._src.sim_metrics import Limits, Outcome, pareto, window_rates
from octavo_scheduler._src.sim_plot import write_png
from octavo_scheduler._src.sim_replay import Replay, compare, recorded_tpot_s
from octavo_scheduler._src.sim_report import charts, label_text, svg, write_csv, write_html, write_json
from octavo_scheduler._src.sim_rerun import COMPARED, Difference, Rerun, has_calls, rerun
from octavo_scheduler._src.sim_state import TICK_S, Books, Requests, StepLine, World, requests_of
from octavo_scheduler._src.sim_sweep import Setup, names, parse_sweep, simulate, sweep
from octavo_scheduler._src.sim_trace import Trace, make_trace, read_trace
from octavo_scheduler._src.sim_turn import HostRules

__all__ = [
    "COMPARED",
    "ROUTES",
    "TICK_S",
    "Books",
    "Cluster",
    "ClusterOutcome",
    "ClusterSpec",
    "CostModel",
    "CountingCache",
    "Difference",
    "Fit",
    "HostRules",
    "Limits",
    "Outcome",
    "Replay",
    "Requests",
    "Rerun",
    "Setup",
    "Simulator",
    "Steady",
    "StepLine",
    "StepSize",
    "TierSpec",
    "Trace",
    "World",
    "charts",
    "compare",
    "fit",
    "has_calls",
    "label_text",
    "make_trace",
    "names",
    "pareto",
    "parse_sweep",
    "read_trace",
    "recorded_tpot_s",
    "requests_of",
    "rerun",
    "simulate",
    "size_of",
    "svg",
    "sweep",
    "window_rates",
    "write_csv",
    "write_html",
    "write_json",
    "write_png",
]
