"""Which configuration the Hopper kernels get: what was measured on this kind of device, else the most that fits shared memory.

Knows `tuned.json`, by device and head size, and what can launch. Knows nothing of how a kernel works.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Final

from octavo_kernels._src.hopper import MULTIPROCESSORS
from octavo_kernels._src.hopper_decode import DecodeConfig
from octavo_kernels._src.hopper_prefill import PrefillConfig
from octavo_kernels._src.mosaic import MAX_SMEM_BYTES

TILES: Final = (64, 128)
STAGES: Final = (2, 3, 4, 6, 8)
MOST_STAGES: Final = 6
"""More were never faster."""


@dataclasses.dataclass(frozen=True)
class HopperChoices:
    """What may be tuned; None leaves it to the table, then to the heuristic.

    Attributes:
        num_ctas: Thread blocks of a kernel; the device's multiprocessors unless given.
        decode_tile_kv, decode_stages: KV tokens of a decode step, steps in shared memory.
        prefill_tile_kv, prefill_stages: The same of a prefill step.
        take_turns: Whether the compute warpgroups of prefill alternate between matrix units and softmax.
    """

    num_ctas: int | None = None
    decode_tile_kv: int | None = None
    decode_stages: int | None = None
    prefill_tile_kv: int | None = None
    prefill_stages: int | None = None
    take_turns: bool | None = None

    def over(self, other: HopperChoices) -> HopperChoices:
        """These, and the other's where these leave it open."""
        mine = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(other, **mine)


def configs(
    group: int,
    pool: tuple[int, ...],
    scale: float,
    choices: HopperChoices | None = None,
    *,
    device_kind: str = "",
    interpreted: bool = False,
) -> tuple[DecodeConfig, PrefillConfig]:
    """What the kernels are compiled for, for pools of a shape.

    Args:
        group: Query heads to a KV head.
        pool: [blocks, kv_heads, block_size, head_dim].
        scale: Of the scores.
        choices: Where they differ from table and heuristic.
        device_kind: As JAX names the device.
        interpreted: For the interpreter.
    """
    _, kv_heads, block_size, head_dim = pool
    chosen = (choices or HopperChoices()).over(_table().get(device_kind, {}).get(head_dim, HopperChoices()))
    shape: dict[str, Any] = {
        "group": group,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "scale": scale,
        "num_ctas": chosen.num_ctas or MULTIPROCESSORS,
        "interpreted": interpreted,
    }
    decode = DecodeConfig(**shape, tile_kv=chosen.decode_tile_kv or 64, stages=chosen.decode_stages or 2)
    long = PrefillConfig(
        **shape, tile_kv=chosen.prefill_tile_kv or 128, stages=chosen.prefill_stages or 2, take_turns=chosen.take_turns is not False
    )
    if not chosen.decode_stages:
        decode = _most_stages(decode)
    return decode, long if chosen.prefill_stages else _most_stages(long)


def candidates(group: int, pool: tuple[int, ...], kernel: str) -> Iterator[tuple[str, HopperChoices]]:
    """Every configuration of the kernel `decode` or `prefill` that can launch, with a name."""
    is_decode = kernel == "decode"
    for tile, stages, turns in itertools.product(TILES, STAGES, (True,) if is_decode else (True, False)):
        if is_decode:
            choice = HopperChoices(decode_tile_kv=tile, decode_stages=stages)
        else:
            choice = HopperChoices(prefill_tile_kv=tile, prefill_stages=stages, take_turns=turns)
        if _can_launch(configs(group, pool, 1.0, choice)[0 if is_decode else 1]):
            yield f"/tile_kv={tile}/stages={stages}" + ("" if is_decode else f"/take_turns={turns}"), choice


def _most_stages(config: Any) -> Any:
    """The same with as many stages as fit."""
    wider = (dataclasses.replace(config, stages=stages) for stages in sorted(STAGES, reverse=True) if stages <= MOST_STAGES)
    return next(c for c in wider if _can_launch(c))


def _can_launch(config: DecodeConfig | PrefillConfig) -> bool:
    """Fits shared memory as it ships; decode's compute warpgroups take turns, so its stages are even."""
    is_even = config.stages % 2 == 0 or isinstance(config, PrefillConfig)
    return is_even and dataclasses.replace(config, interpreted=False).smem_bytes() <= MAX_SMEM_BYTES


@functools.cache
def _table() -> dict[str, dict[int, HopperChoices]]:
    text = files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    return {kind: {int(size): HopperChoices(**found) for size, found in sizes.items()} for kind, sizes in json.loads(text).items()}
