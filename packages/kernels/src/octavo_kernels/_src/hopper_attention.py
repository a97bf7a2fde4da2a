"""Paged attention for Hopper GPUs: `hopper_decode` for rows with one new token, `hopper_prefill` for longer rows, `hopper_latent` for both
over MLA latents; one call for all.

Knows what the kernels can serve and which configuration they get. Knows nothing of what happens inside them.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int32, UInt8

from octavo_core.seams import AttentionBatch
from octavo_core.specs import KVGroupSpec
from octavo_kernels._src.fp8 import FP8
from octavo_kernels._src.hopper import copies_scales, multiprocessors, require_hopper
from octavo_kernels._src.hopper_decode import DecodeConfig, partial_results
from octavo_kernels._src.hopper_latent_step import attend_latents
from octavo_kernels._src.hopper_merge import merge
from octavo_kernels._src.hopper_prefill import prefill
from octavo_kernels._src.hopper_shares import share_out
from octavo_kernels._src.hopper_tiles import cut
from octavo_kernels._src.hopper_tuning import HopperChoices, Rules, configs, latent_config
from octavo_kernels._src.pools import Pools, gather_blocks, new_pools, scatter_blocks, write_pools

HEAD_DIMS: Final = (64, 128, 256)
BLOCK_SIZES: Final = (16, 32, 64)
LATENT_DIMS: Final = (576,)
"""Of DeepSeek's models and their like: 512 of the latent, 64 that carry positions."""
KINDS: Final = ("full", "window", "latent")
STORED: Final = ("bfloat16", *FP8)


class HopperAttention:
    """`octavo_core.seams.AttentionBackend` in Pallas Mosaic GPU kernels.

    Args:
        choices: Of configurations.
        interpret: Parameters of Pallas's GPU interpreter, to run on a CPU; None needs a Hopper GPU.

    Raises:
        NotImplementedError: Where JAX sees no Hopper GPU.
    """

    layout_id: str = "hopper-bhsd-1"

    def __init__(self, *, choices: HopperChoices | None = None, interpret: Any = None) -> None:
        self._choices, self._device_kind = choices or HopperChoices(), ""
        if interpret is None:
            require_hopper()
            self._choices = self._choices.over(HopperChoices(num_ctas=multiprocessors()))
            self._device_kind = jax.devices()[0].device_kind
        self._interpret = interpret

    def init_kv(self, spec: KVGroupSpec, num_blocks: int) -> Pools:
        """Zeroed memory.

        Raises:
            NotImplementedError: For groups, element types, head sizes and block sizes the kernels do not serve.
        """
        if spec.kind not in KINDS:
            raise NotImplementedError(f"hopper attention serves {' and '.join(KINDS)} attention, this group is '{spec.kind}'")
        if spec.dtype not in STORED:
            raise NotImplementedError(
                f"hopper attention stores {', '.join(STORED)}, this group wants {spec.dtype}; set --dtype bfloat16 or --kv-cache-dtype"
            )
        is_latent = spec.kind == "latent"
        dims, what = (LATENT_DIMS, "latents") if is_latent else (HEAD_DIMS, "heads")
        if spec.head_dim not in dims:
            raise NotImplementedError(f"hopper attention serves {what} of {dims} elements, these have {spec.head_dim}")
        if is_latent and (spec.sinks or spec.window is not None):
            raise NotImplementedError("hopper attention serves latents without windows and sinks, this group has some")
        if spec.block_size not in BLOCK_SIZES:
            raise NotImplementedError(f"hopper attention serves blocks of {BLOCK_SIZES} tokens, these hold {spec.block_size}")
        if spec.dtype.startswith("float8") and not copies_scales(spec.block_size):
            raise NotImplementedError(
                f"JAX {jax.__version__} cannot copy the scales of an FP8 block of {spec.block_size}; set --block-size 32 or install JAX 0.11"
            )
        return new_pools(spec, num_blocks, spec.dtype)

    def write(
        self,
        kv: Pools,
        layer: int,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> Pools:
        """Store K and V of the step's tokens. Cost: the bytes written."""
        return write_pools(kv, layer, k, v, slot_mapping)

    def attend(
        self,
        kv: Pools,
        layer: int,
        q: Float[Array, "tokens q_heads head_dim"],
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float[Array, " q_heads"] | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Causal attention. Queries are rounded to bfloat16.

        Cost: rows with one new token read the KV they can see once; longer rows once per tile of queries.
        """
        pools = {name: pool[layer] for name, pool in kv._asdict().items() if pool}
        if "v" not in pools:
            return self._over_latents(pools, q, batch, scale, softcap)
        _, kv_heads, _, head_dim = pools["k"].shape
        group = q.shape[1] // kv_heads
        decode, long = configs(
            group,
            pools["k"].shape,
            scale,
            self._choices,
            rules=Rules(window, softcap, sinks is not None),
            stored=pools["k"].dtype.name,
            device_kind=self._device_kind,
            interpreted=self._interpret is not None,
        )
        low = _folded(q.astype(jnp.bfloat16).reshape(len(q), kv_heads, group, head_dim), decode)
        scores = None if sinks is None else _folded(sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1), decode)[0, :, :, 0]
        out = self._decode(low, pools, _token_rows(batch, len(q)), scores, decode)
        if len(q) > len(batch.context_len):
            answers = prefill(low, pools, batch.block_table, cut(batch, len(q), long), scores, long, self._interpret)
            index = jnp.arange(len(q))[:, None, None, None]
            out = jnp.pad(out, ((0, len(q) - len(out)), (0, 0), (0, 0), (0, 0)))
            live = batch.query_start[batch.num_rows]
            out = jnp.where((index >= batch.num_single) & (index < live), answers, out)
        out = out.reshape(len(q), kv_heads, -1, head_dim)[:, :, :group]
        return out.reshape(q.shape).astype(q.dtype)

    def _over_latents(
        self,
        pools: dict[str, Array],
        q: Float[Array, "tokens q_heads head_dim"],
        batch: AttentionBatch,
        scale: float,
        softcap: float | None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        config = latent_config(
            q.shape[1],
            pools["k"].shape,
            scale,
            self._choices,
            softcap=softcap,
            stored=pools["k"].dtype.name,
            single=len(q) <= len(batch.context_len),
            interpreted=self._interpret is not None,
        )
        return attend_latents(q.astype(jnp.bfloat16), pools, batch, config, self._interpret).astype(q.dtype)

    def _decode(
        self,
        q: BFloat16[Array, "tokens heads group head_dim"],
        pools: dict[str, Array],
        rows: _Rows,
        sinks: Float32[Array, "heads group"] | None,
        config: DecodeConfig,
    ) -> BFloat16[Array, "rows heads group head_dim"]:
        shares = share_out(rows.context_len, rows.num_rows, config)
        partial, lse = partial_results(q, pools, rows.block_table, rows.context_len, shares, config, self._interpret)
        scores = None if sinks is None else sinks.reshape(-1)
        return merge(partial, lse, shares.rows, scores, config, self._interpret)[:, :, : config.group]

    def gather(self, kv: Pools, block_ids: Int32[Array, " ids"]) -> UInt8[Array, "ids block_bytes"]:
        """All layers of each block: K then V of layer 0, of layer 1, … An id outside the pool answers zeros."""
        return gather_blocks(kv, block_ids)

    def scatter(self, kv: Pools, block_ids: Int32[Array, " ids"], data: UInt8[Array, "ids block_bytes"]) -> Pools:
        """The inverse of `gather`; id −1 stores nothing."""
        return scatter_blocks(kv, block_ids, data)


def _folded(x: Float[Array, "tokens kv_heads group elements"], config: DecodeConfig) -> Float[Array, "tokens heads part elements"]:
    """Query heads of a KV head as several heads of the kernel, the last one padded."""
    spare = config.fold * config.group - x.shape[2]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, spare), (0, 0))) if spare else x
    return x.reshape(len(x), -1, config.group, x.shape[3])


class _Rows(NamedTuple):
    """Rows with one new token, at flat index = row."""

    context_len: Int32[Array, " rows"]
    block_table: Int32[Array, "rows max_blocks"]
    num_rows: Int32[Array, ""]


def _token_rows(batch: AttentionBatch, tokens: int) -> _Rows:
    """What decode serves: the rows with one new token; in a step of no more tokens than rows, every token as a row of its own.

    The second costs a row with several tokens one reading of its KV for each, and spares a step of single tokens everything that
    longer rows need.
    """
    rows = len(batch.context_len)
    if tokens > rows:
        return _Rows(batch.context_len, batch.block_table, batch.num_single)
    index = jnp.arange(tokens)
    row = jnp.minimum(jnp.sum(batch.query_start[1:] <= index[:, None], axis=1), rows - 1)
    seen = jnp.minimum(batch.positions + 1, batch.context_len[row])
    return _Rows(seen, batch.block_table[row], batch.query_start[batch.num_rows])
