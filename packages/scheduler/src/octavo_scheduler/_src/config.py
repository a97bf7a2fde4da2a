"""What can be chosen about scheduling. Knows ranges; knows neither cache nor model."""

from __future__ import annotations

import dataclasses
from typing import Final

from octavo_core.config import option
from octavo_core.errors import ConfigError

GROUP: Final = "scheduling"
POLICIES: Final = ("fcfs", "priority")


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Sizes and policy of a `ChunkedScheduler`.

    Raises:
        ConfigError: For a value out of range.
    """

    max_num_seqs: int = option(256, "Most sequences that run at once, the rows of a step", group=GROUP)
    token_budget: int = option(2048, "Most new tokens in a step", group=GROUP, aliases=("--max-num-batched-tokens",))
    chunk_size: int = option(
        0,
        "Most prompt tokens of one sequence in a step; 0 or more than the budget: the budget",
        group=GROUP,
        aliases=("--chunked-prefill-size",),
    )
    max_arrivals: int = option(8, "Most sequences admitted between two steps", group=GROUP)
    policy: str = option("fcfs", "Who goes first: by arrival, or by priority and then arrival", group=GROUP, choices=POLICIES)
    watermark_blocks: int = option(0, "KV blocks left free when a sequence joins running ones", group=GROUP)

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("token_budget", 1),
            ("chunk_size", 0),
            ("max_arrivals", 1),
            ("watermark_blocks", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is at least {least}, got {getattr(self, name)}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy is one of {', '.join(POLICIES)}, got '{self.policy}'")

    @property
    def chunk_tokens(self) -> int:
        """The chunk size in force: `chunk_size` reconciled with the budget, so that no chunk is larger than a step."""
        return min(self.chunk_size or self.token_budget, self.token_budget)
