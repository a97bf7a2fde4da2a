"""Steps that attention is tested on and measured on: one table for tests and benches.

`HOPPER_CASES` go around the edges of the kernels' tiles and are checked against dense attention in float64; `SPEED_CASES` are as large as
serving is, and are checked against the float32 reference at a sample of their tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from octavo_core.testing.attention import CASES, AttentionCase

EDGES: Final = (0, 14, 15, 16, 62, 63, 64, 126, 127, 128, 299)
"""Tokens in memory before one more: contexts of 1, around a block, around a tile, over several tiles."""


def _case(name: str, rows: tuple[tuple[int, int], ...], *, dtype: str = "bfloat16", **shape: Any) -> AttentionCase:
    return AttentionCase(name, rows, dtype=dtype, q_dtype="bfloat16", **shape)


def _latents(name: str, rows: tuple[tuple[int, int], ...], **shape: Any) -> AttentionCase:
    return _case(name, rows, kind="latent", kv_heads=1, head_dim=576, **shape)


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
_SINGLES: Final = tuple((old, 1) for old in EDGES)
_CHUNKS: Final = ((40, 1), (127, 1), (0, 130), (61, 3), (64, 64), (190, 33))

HOPPER_CASES: Final = (
    _case("decode at the edges of blocks and tiles", _SINGLES, q_heads=8, kv_heads=2, head_dim=128, block_size=16, spare_rows=5),
    _case("decode, one query head to a KV head", _SINGLES, q_heads=2, kv_heads=2, head_dim=64, block_size=32, spare_rows=5),
    _case("decode, 8 query heads to a KV head", _SINGLES, q_heads=16, kv_heads=2, head_dim=128, block_size=64, spare_rows=5),
    _case("decode, 3 query heads to a KV head", _SINGLES, q_heads=9, kv_heads=3, head_dim=64, block_size=16, spare_rows=5),
    _case("decode, 12 query heads to a KV head", _SINGLES, q_heads=12, kv_heads=1, head_dim=128, block_size=32, spare_rows=5),
    _case("one row alone over a long context", ((2999, 1),), q_heads=8, kv_heads=1, head_dim=128, spare_rows=0, spare_tokens=0),
    _case("few tokens of one row", ((77, 6), (0, 3)), q_heads=8, kv_heads=2, head_dim=128, spare_rows=10),
    _case("chunks beside decode", _CHUNKS, q_heads=8, kv_heads=2, head_dim=128, block_size=16, spare_tokens=9),
    _case("chunks beside decode, 8 query heads", _CHUNKS, q_heads=8, kv_heads=1, head_dim=64, block_size=32, spare_tokens=9),
    _case("chunks beside decode, 3 query heads", _CHUNKS, q_heads=6, kv_heads=2, head_dim=64, block_size=64, spare_tokens=9),
    _case("chunks beside decode, blocks of 64", _CHUNKS, q_heads=4, kv_heads=4, head_dim=128, block_size=64, spare_tokens=9),
    _case("prompts only", ((0, 257), (300, 100)), q_heads=8, kv_heads=2, head_dim=128, block_size=32),
    _case("heads of 256", _CHUNKS, q_heads=4, kv_heads=2, head_dim=256, block_size=32, spare_tokens=9),
    _case("decode, heads of 256", _SINGLES, q_heads=2, kv_heads=1, head_dim=256, block_size=64, spare_rows=5),
    _case("71 query heads to one KV head", ((40, 1), (61, 3), (5, 20)), q_heads=71, kv_heads=1, head_dim=64, block_size=16),
    _case("a window", _CHUNKS, q_heads=4, kv_heads=2, head_dim=64, block_size=16, kind="window", window=50),
    _case(
        "decode in a window", _SINGLES, q_heads=8, kv_heads=2, head_dim=64, block_size=32, kind="window", window=100, spare_rows=5
    ),
    _case("a window with sinks", _CHUNKS, q_heads=8, kv_heads=2, head_dim=64, block_size=32, kind="window", window=128, sinks=True),
    _case("sinks, 71 query heads to one KV head", ((40, 1), (61, 3), (5, 20)), q_heads=71, kv_heads=1, head_dim=64, sinks=True),
    _case("a soft cap, heads of 256", ((40, 1), (61, 30)), q_heads=4, kv_heads=2, head_dim=256, block_size=32, softcap=1.5),
    _case("e4m3, decode at the edges of blocks and tiles", _SINGLES, dtype=E4M3, q_heads=8, kv_heads=2, head_dim=128, spare_rows=5),
    _case("e4m3, chunks beside decode", _CHUNKS, dtype=E4M3, q_heads=8, kv_heads=2, head_dim=64, block_size=32, spare_tokens=9),
    _case("e5m2, chunks beside decode", _CHUNKS, dtype=E5M2, q_heads=4, kv_heads=1, head_dim=128, block_size=64, spare_tokens=9),
    _case(
        "e4m3, a window with sinks, heads of 256",
        ((70, 1), (61, 30)),
        dtype=E4M3,
        q_heads=2,
        kv_heads=1,
        head_dim=256,
        kind="window",
        window=50,
        sinks=True,
    ),
    _latents("latents, decode at the edges of blocks and tiles", _SINGLES, q_heads=16, block_size=64, spare_rows=5),
    _latents("latents, chunks beside decode", ((40, 1), (127, 1), (0, 70), (61, 3)), q_heads=16, block_size=16, spare_tokens=9),
    _latents("latents, 71 query heads", ((40, 1), (61, 3)), q_heads=71, block_size=32),
    _latents("latents in e4m3, chunks beside decode", ((40, 1), (127, 1), (61, 30)), dtype=E4M3, q_heads=8, block_size=32),
    *(case for case in CASES if case.dtype == case.q_dtype == "bfloat16" and case.head_dim in (64, 128)),
)


@dataclasses.dataclass(frozen=True)
class SpeedCase:
    """A step to time.

    Attributes:
        name: Stable: comparisons hang on it.
        rows: (tokens already in memory, new tokens) of each row; rows with one new token first.
        q_heads, kv_heads, head_dim, block_size: Shapes.
        dtype: Of stored KV; FP8 has scales.
        window: Tokens looked back, or None.
        is_latent: One stored vector a token is key and value.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 32
    dtype: str = "bfloat16"
    window: int | None = None
    is_latent: bool = False

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return sum(new for _, new in self.rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, scales included, that a step must read at least once."""
        each = (1 if self.is_latent else 2) * self.kv_heads * (self.head_dim * 2 if self.dtype == "bfloat16" else self.head_dim + 4)
        return sum(min(old + new, new + (self.window or old + new) - 1) for old, new in self.rows) * each

    @property
    def flops(self) -> int:
        """Multiplications and additions of visible pairs, in both products."""
        far = self.window or max(old + new for old, new in self.rows)
        pairs = sum(min(position + 1, far) for old, new in self.rows for position in range(old, old + new))
        return 4 * pairs * self.q_heads * self.head_dim


def _decode(rows: int, context: int, **shape: Any) -> SpeedCase:
    marks = "".join(f"/{key}={value}" for key, value in shape.items())
    return SpeedCase(f"decode/rows={rows}/context={context}{marks}", ((context - 1, 1),) * rows, **shape)


def _mla(name: str, rows: tuple[tuple[int, int], ...], **shape: Any) -> SpeedCase:
    marks = "".join(f"/{key}={value}" for key, value in shape.items())
    return SpeedCase(name + marks, rows, **{"q_heads": 128, **shape}, kv_heads=1, head_dim=576, block_size=64, is_latent=True)


def _uneven(rows: int, longest: int) -> SpeedCase:
    return SpeedCase(f"decode/rows={rows}/context<={longest}", tuple((longest * (i + 1) // rows - 1, 1) for i in range(rows)))


SPEED_CASES: Final = (
    _decode(64, 1024),
    _decode(64, 4096),
    _decode(64, 4096, block_size=16),
    _decode(64, 4096, block_size=64),
    _decode(64, 4096, q_heads=64),
    _decode(64, 4096, q_heads=8),
    _decode(64, 4096, q_heads=24, head_dim=64),
    _decode(256, 1024),
    _decode(128, 8192),
    _decode(64, 4096, head_dim=256, q_heads=16, kv_heads=4),
    _decode(64, 4096, window=1024),
    _decode(64, 4096, dtype=E4M3),
    _decode(64, 1024, dtype=E4M3),
    _decode(64, 4096, dtype=E5M2),
    _decode(64, 4096, dtype=E4M3, head_dim=64, q_heads=24),
    _uneven(64, 16384),
    _decode(8, 32768),
    _decode(1, 4096),
    _decode(1, 131072),
    _mla("decode/latents/rows=64/context=4096", ((4095, 1),) * 64),
    _mla("decode/latents/rows=64/context=4096", ((4095, 1),) * 64, q_heads=16),
    _mla("decode/latents/rows=64/context=4096", ((4095, 1),) * 64, q_heads=16, dtype=E4M3),
    _mla("decode/latents/rows=128/context=8192", ((8191, 1),) * 128, q_heads=16),
    SpeedCase("prefill/rows=1/query=8192", ((0, 8192),)),
    _mla("prefill/latents/rows=1/query=2048", ((0, 2048),), q_heads=16),
    SpeedCase("prefill/rows=4/query=2048", ((0, 2048),) * 4),
    SpeedCase("prefill/rows=1/query=2048/context=32768", ((32768 - 2048, 2048),)),
    SpeedCase("prefill/rows=1/query=8192/head_dim=64", ((0, 8192),), head_dim=64),
    SpeedCase("prefill/rows=1/query=8192/head_dim=256", ((0, 8192),), q_heads=16, kv_heads=4, head_dim=256),
    SpeedCase("prefill/rows=1/query=8192/window=1024", ((0, 8192),), window=1024),
    SpeedCase("prefill/rows=1/query=8192/dtype=float8_e4m3fn", ((0, 8192),), dtype=E4M3),
    SpeedCase("mixed/rows=64/context=4096/query=1024", ((4095, 1),) * 63 + ((1024, 1024),)),
)
QUICK: Final = ("decode/rows=64/context=4096", "prefill/rows=1/query=8192")
"""What `--quick` times."""
