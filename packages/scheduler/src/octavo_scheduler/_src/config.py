"""What can be chosen about scheduling. Knows ranges; knows neither cache nor model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from octavo_core.config import option
from octavo_core.errors import ConfigError

GROUP: Final = "scheduling"
POLICIES: Final = ("fcfs", "priority", "lpm", "fair", "edf")
CHUNK_POLICIES: Final = ("fixed", "adaptive", "slo")
KNOBS: Final = (
    "token_budget",
    "chunk_size",
    "target_itl_ms",
    "tenant_weights",
    "fair_quantum",
    "max_overtakes",
    "watermark_blocks",
)
"""Settings that decide no shape: in a simulation they are values of the program, so that a sweep of them compiles once."""
RESERVATIONS: Final = ("none", "optimistic", "guaranteed")
LEAST: Final = {"max_num_seqs": 1, "token_budget": 1, "max_arrivals": 1, "fair_quantum": 1, "max_overtakes": 1}
"""Bounds of the settings that may not be 0; all other numbers may."""


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Sizes and policies of a `ChunkedScheduler`.

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
    chunk_policy: str = option(
        "fixed",
        "How much prompt a step takes: chunk_size, less the more sequences decode, or what keeps the step under the target ITL",
        group=GROUP,
        choices=CHUNK_POLICIES,
    )
    target_itl_ms: int = option(0, "Longest step wanted while sequences decode (slo); 0: some decode steps", group=GROUP)
    slo_prior_us: tuple[int, int, int] = (20_000, 0, 100)
    """What `slo` takes a step to cost until it has seen some, in µs: any step, a decode row more, a prompt token more."""
    step_sizes: tuple[int, ...] = ()
    """Token counts the device pads a step to; `slo` fills one of them. Empty: it pads to nothing."""
    max_num_partial_prefills: int = option(0, "Most sequences whose prompts are computed in one step; 0: no bound", group=GROUP)
    max_long_partial_prefills: int = option(1, "Of these, at most so many long ones", group=GROUP)
    long_prefill_token_threshold: int = option(
        0, "Prompts with more to compute are long, and take at most so much of a step; 0: none is", group=GROUP
    )
    max_arrivals: int = option(8, "Most sequences admitted between two steps", group=GROUP)
    policy: str = option(
        "fcfs",
        "Who goes first: by arrival; priority; longest cached prefix (lpm); least served tenant (fair); earliest deadline (edf)",
        group=GROUP,
        choices=POLICIES,
    )
    tenant_weights: tuple[int, ...] = (1,)
    """Share of each tenant under `fair`, relative to the others; tenants beyond the last count as the last."""
    fair_quantum: int = option(
        2048, "Tokens a tenant may be served ahead of one that waits before a row of it is preempted (fair)", group=GROUP
    )
    max_overtakes: int = option(64, "Later arrivals that may pass a waiting sequence (lpm)", group=GROUP)
    reservation: str = option(
        "optimistic",
        "KV kept for what admitted sequences may still write: one token, an estimate, or all of it (nobody is ever preempted)",
        group=GROUP,
        choices=RESERVATIONS,
    )
    watermark_blocks: int = option(0, "KV blocks left free when a sequence joins running ones", group=GROUP)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), LEAST.get(field.name, 0)
            if isinstance(value, int) and value < least:
                raise ConfigError(f"{field.name} is at least {least}, got {value}")
        for name, known in (("policy", POLICIES), ("chunk_policy", CHUNK_POLICIES), ("reservation", RESERVATIONS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is one of {', '.join(known)}, got '{getattr(self, name)}'")
        if not self.tenant_weights or not all(1 <= w <= 1_000 for w in self.tenant_weights):
            raise ConfigError(f"tenant_weights has an entry of 1 to 1000 for each tenant, got {self.tenant_weights}")
        if list(self.step_sizes) != sorted(set(self.step_sizes)) or min(self.step_sizes, default=1) < 1:
            raise ConfigError(f"step_sizes rise from at least 1, got {self.step_sizes}")
        if len(self.slo_prior_us) != 3 or min(self.slo_prior_us) < 0:
            raise ConfigError(f"slo_prior_us has three costs of at least 0 µs, got {self.slo_prior_us}")

    @property
    def chunk_tokens(self) -> int:
        """The chunk size in force: `chunk_size` reconciled with the budget, so that no chunk is larger than a step."""
        return min(self.chunk_size or self.token_budget, self.token_budget)

    @property
    def knobs(self) -> dict[str, Any]:
        """The values of `KNOBS`."""
        return {name: getattr(self, name) for name in KNOBS}

    def turned(self, knobs: Mapping[str, Any]) -> SchedulerConfig:
        """The same with values of a program that is being traced for some of its `KNOBS`. Nothing is checked."""
        config = copy.copy(self)
        for name, value in knobs.items():
            object.__setattr__(config, name, value)
        return config
