"""Which configuration the Hopper kernels get: what was measured on this kind of device, else the most that fits shared memory.

Knows `tuned.json`, by device and head size, and what can launch: shared memory by the configuration's own arithmetic, registers by
`compiled.json`, what the assembler said (`python -m octavo_kernels.aot --sweep`). Knows nothing of how a kernel works.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Final, NamedTuple

from octavo_kernels._src.hopper import MULTIPROCESSORS
from octavo_kernels._src.hopper_decode import DecodeConfig
from octavo_kernels._src.hopper_latent import LatentConfig
from octavo_kernels._src.hopper_tiles import PrefillConfig
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


MAX_GROUP: Final = 64
"""Query heads of a head, in the kernels: rows of decode's matrix product."""


class Rules(NamedTuple):
    """What a group asks of attention beside its shapes; as in `KVGroupSpec`."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def fold_of(group: int) -> tuple[int, int]:
    """How many heads of the kernels read one KV head that `group` query heads share, and query heads of each; the last may be padded."""
    fold = -(-group // MAX_GROUP)
    return fold, -(-group // fold)


def configs(
    group: int,
    pool: tuple[int, ...],
    scale: float,
    choices: HopperChoices | None = None,
    *,
    rules: Rules = Rules(),  # noqa: B008 (immutable)
    stored: str = "bfloat16",
    device_kind: str = "",
    interpreted: bool = False,
    proven: bool = True,
) -> tuple[DecodeConfig, PrefillConfig]:
    """What the kernels are compiled for, for pools of a shape.

    Args:
        group: Query heads to a KV head.
        pool: [blocks, kv_heads, block_size, head_dim].
        scale: Of the scores.
        choices: Where they differ from table and heuristic.
        rules: Of the group.
        stored: Name of the pool's element type.
        device_kind: As JAX names the device.
        interpreted: For the interpreter.
        proven: Only what is known to keep to registers; to compile others and see, False.

    Raises:
        NotImplementedError: If no configuration fits.
    """
    _, kv_heads, block_size, head_dim = pool
    known = _table().get(device_kind, {}).get(head_dim, HopperChoices()) if stored == "bfloat16" else HopperChoices()
    chosen = (choices or HopperChoices()).over(known)
    fold, heads = fold_of(group)
    shape: dict[str, Any] = {
        "group": heads,
        "kv_heads": kv_heads * fold,
        "fold": fold,
        "head_dim": head_dim,
        "block_size": block_size,
        "stored": stored,
        "scale": scale,
        "window": rules.window,
        "soft_cap": rules.softcap,
        "num_ctas": chosen.num_ctas or MULTIPROCESSORS,
        "interpreted": interpreted,
    }
    decode = DecodeConfig(**shape)
    long = PrefillConfig(**shape, sinks=rules.sinks, take_turns=chosen.take_turns is not False and stored == "bfloat16")
    return (
        _fitted(decode, (64,), chosen.decode_tile_kv, chosen.decode_stages, proven=proven),
        _fitted(long, (128, 64), chosen.prefill_tile_kv, chosen.prefill_stages, proven=proven),
    )


def latent_config(
    q_heads: int,
    pool: tuple[int, ...],
    scale: float,
    choices: HopperChoices | None = None,
    *,
    softcap: float | None = None,
    stored: str = "bfloat16",
    single: bool = False,
    interpreted: bool = False,
) -> LatentConfig:
    """What the kernel over MLA latents is compiled for. Shared memory leaves nothing to choose: queries and two steps of 64 tokens fill it.

    Args:
        q_heads: Query heads.
        pool: [blocks, 1, block_size, head_dim].
        scale: Of the scores.
        choices: Of thread blocks.
        softcap: Of the scores.
        stored: Name of the pool's element type.
        single: No step has more tokens than rows: a tile of one token each, so that only its rows are written.
        interpreted: For the interpreter.
    """
    fold, heads = fold_of(q_heads)
    return LatentConfig(
        heads=heads,
        tile_q=1 if single else MAX_GROUP // heads,
        kv_heads=fold,
        head_dim=pool[3],
        block_size=pool[2],
        scale=scale,
        soft_cap=softcap,
        num_ctas=(choices and choices.num_ctas) or MULTIPROCESSORS,
        stored=stored,
        interpreted=interpreted,
    )


def candidates(group: int, pool: tuple[int, ...], kernel: str, stored: str = "bfloat16") -> Iterator[tuple[str, HopperChoices]]:
    """Every configuration of the kernel `decode` or `prefill` that can launch and spills nothing, with a name; of FP8 tiles never wait for
    turns."""
    is_decode = kernel == "decode"
    for tile, stages, turns in itertools.product(TILES, STAGES, (True,) if is_decode or stored != "bfloat16" else (True, False)):
        if is_decode:
            choice = HopperChoices(decode_tile_kv=tile, decode_stages=stages)
        else:
            choice = HopperChoices(prefill_tile_kv=tile, prefill_stages=stages, take_turns=turns)
        got = configs(group, pool, 1.0, choice, stored=stored)[0 if is_decode else 1]
        if (got.tile_kv, got.stages) == (tile, stages):
            yield f"/tile_kv={tile}/stages={stages}" + ("" if is_decode else f"/take_turns={turns}"), choice


def _fitted(config: Any, tiles: tuple[int, ...], tile_kv: int | None, stages: int | None, *, proven: bool) -> Any:
    """The same with the tile and stages that were chosen; where none were, or they do not fit, the first tile that fits and as many
    stages as do."""
    first = stages if stages is not None else MOST_STAGES
    wanted = dataclasses.replace(config, tile_kv=tile_kv or tiles[0], stages=first)
    if stages is not None and (config.interpreted or _can_launch(wanted, proven=proven)):
        return wanted
    sizes = tiles if tile_kv is None else (tile_kv, *tiles)
    counts = [n for n in sorted(STAGES, reverse=True) if n <= MOST_STAGES]
    fits = (dataclasses.replace(config, tile_kv=size, stages=n) for size in sizes for n in counts)
    found = next((c for c in fits if _can_launch(c, proven=proven)), None)
    if found is None:
        raise NotImplementedError(
            f"no Hopper kernel for heads of {config.head_dim} elements in {config.stored} is known to fit shared memory and registers; "
            "see python -m octavo_kernels.aot --sweep"
        )
    return found


def _can_launch(config: DecodeConfig | PrefillConfig, *, proven: bool) -> bool:
    """Fits shared memory and registers as it ships; decode's compute warpgroups take turns, so its stages are even."""
    is_even = config.stages % 2 == 0 or isinstance(config, PrefillConfig)
    fits = dataclasses.replace(config, interpreted=False).smem_bytes() <= MAX_SMEM_BYTES
    return is_even and fits and (keeps_to_registers(config) or not proven)


def keeps_to_registers(config: DecodeConfig | PrefillConfig) -> bool:
    """Compiled, it spilled nothing, with and without window, cap and sinks. What nobody compiled counts as spilling."""
    kind = ("prefill", config.take_turns) if isinstance(config, PrefillConfig) else ("decode", False)
    return _compiled().get(Compiled(kind[0], config.head_dim, config.stored, config.tile_kv, kind[1])) == 0


@functools.cache
def _table() -> dict[str, dict[int, HopperChoices]]:
    text = files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    return {kind: {int(size): HopperChoices(**found) for size, found in sizes.items()} for kind, sizes in json.loads(text).items()}


class Compiled(NamedTuple):
    """What registers depend on, as `compiled.json` names it."""

    kernel: str
    head_dim: int
    stored: str
    tile_kv: int
    take_turns: bool


@functools.cache
def _compiled() -> dict[Compiled, int]:
    """Most bytes a thread spilled."""
    text = files(__package__).joinpath("compiled.json").read_text(encoding="utf-8")
    return {Compiled(**{name: found[name] for name in Compiled._fields}): found["spilled_bytes"] for found in json.loads(text)}
