"""A jitted chunked-prefill scheduler: one pure step over fixed shapes.

`ChunkedScheduler` implements the seam `octavo_core.seams.Scheduler` around any `PrefixCache`. `query_lens` and `choose_victim` are
its two decisions as pure functions, for those who want to study or replace one of them.
"""

from octavo_scheduler._src.config import SchedulerConfig
from octavo_scheduler._src.policy import choose_victim, query_lens
from octavo_scheduler._src.scheduler import ChunkedScheduler
from octavo_scheduler._src.state import FREE, RUNNING, WAITING, SchedulerState

__version__ = "0.1.0"

__all__ = ["FREE", "RUNNING", "WAITING", "ChunkedScheduler", "SchedulerConfig", "SchedulerState", "choose_victim", "query_lens"]
