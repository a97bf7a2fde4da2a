"""The places where Octavo comes apart: one Protocol per replaceable component.

A method that takes and returns state is pure and jittable; a method that does I/O takes no state. A component is any object
with these methods; nothing is inherited and nothing registered. `octavo_core.testing` has a conformance suite and the
smallest legal implementation of each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8, UInt32

from octavo_core.plan import Admitted, Arrivals, CacheEvents, Loaded, Sampled, SamplingArrivals, StepPlan, StepResult
from octavo_core.specs import CacheSpec, KVGroupSpec
from octavo_core.tiers import Tier as Tier
from octavo_core.wire import EngineOutput, EngineRequest, EngineStats

C = TypeVar("C")
C_in = TypeVar("C_in", contravariant=True)
S = TypeVar("S")
KV = TypeVar("KV")


@runtime_checkable
class PrefixCache(Protocol[C]):
    """Who holds which KV block, and which prefixes are already computed. Contents of blocks are elsewhere.

    Between calls every block is exactly one of: free, cached (findable, unleased), leased by one or more sequences. A block
    leased by anybody is never evicted or handed out. Block 0 of each group is reserved.
    """

    spec: CacheSpec

    def init(self) -> C:
        """The empty cache."""

    def admit(
        self,
        cache: C,
        sequence: Int32[Array, " arrivals"],
        tokens: Int32[Array, "arrivals max_len"],
        lengths: Int32[Array, " arrivals"],
        namespace: UInt32[Array, "arrivals 2"],
        tenant: Int32[Array, " arrivals"],
        want: Int32[Array, "arrivals groups"],
        reserve: Int32[Array, " groups"],
    ) -> tuple[C, Admitted]:
        """Find the longest cached prefix of each and lease it to `sequence` (−1 skips an entry).

        Entries are served in order. One is admitted only when, with `reserve` blocks kept for others, the pool could still
        give it the rest of `want` (its blocks in all, cached ones included); otherwise it leases nothing and
        its status is `OUT_OF_BLOCKS`. At most `lengths − 1` tokens are reported cached: one is left to compute. Where their last
        block is only partly cached, `grow` copies it. `tenant` is whose share the blocks count against.
        """

    def grow(
        self, cache: C, need: Int32[Array, "sequences groups"], rank: Int32[Array, " sequences"]
    ) -> tuple[C, Int32[Array, "groups sequences max_blocks"], Int32[Array, "groups sequences 2"], Int32[Array, " sequences"]]:
        """Let each sequence hold `need` blocks, evicting unleased cached blocks when the free list is empty.

        Never shrinks. Lower `rank` is served first; a sequence gets all it lacks or nothing (`OUT_OF_BLOCKS`), and after the
        first refusal nobody of higher rank takes a block. Answers the block table of every sequence, the copy of a block (from, to)
        that each needs before it writes (−1: none), and its status. In groups that look back a limited way (`window`, `state`) blocks out
        of reach are given up and the table points at block 0 there.
        """

    def commit(
        self, cache: C, tokens: Int32[Array, "sequences max_len"], upto: Int32[Array, " sequences"]
    ) -> tuple[C, Int32[Array, "groups sequences max_blocks"]]:
        """Make the full blocks below `upto` tokens findable.

        Where an equal prefix is cached already the sequence's own block is given back and its table points at the cached
        one; a block given back may be handed out at once, so device steps must run in the order they were planned in. Bounded
        work per call: what is left is committed by later calls. Answers the block table of every sequence.
        """

    def release(self, cache: C, done: Bool[Array, " sequences"]) -> tuple[C, CacheEvents]:
        """End the leases of these sequences; committed blocks stay cached, the rest become free. Drains the events."""


@runtime_checkable
class MatchingCache(Protocol[C_in]):
    """What the scheduling policy `lpm` wants of a `PrefixCache` besides: how long a cached prefix is, without leasing it."""

    def match(
        self,
        cache: C_in,
        tokens: Int32[Array, "arrivals max_len"],
        lengths: Int32[Array, " arrivals"],
        namespace: UInt32[Array, "arrivals 2"],
        tenant: Int32[Array, " arrivals"],
    ) -> Int32[Array, " arrivals"]:
        """Leading tokens of each that `admit` would find now; 0 for lengths ≤ 1."""


@runtime_checkable
class LoadingCache(Protocol[C]):
    """What tiers below the device want of a `PrefixCache` besides: taking in blocks that nobody here computed, and lending out blocks.

    A block has one id in all groups that keep every block, and one of its own in each group that keeps the last few only.
    """

    def load(
        self,
        cache: C,
        tokens: Int32[Array, " max_len"],
        first: Int32[Array, ""],
        upto: Int32[Array, ""],
        namespace: UInt32[Array, " 2"],
        tenant: Int32[Array, ""],
        complete: Bool[Array, " max_blocks"],
    ) -> tuple[C, Loaded]:
        """Make blocks `first` to `upto` of a prompt findable, as far as those before `first` are, and lease all until `unload`.

        Blocks are taken for those that are not cached yet, as many as there are, evicting others if it must. The caller
        writes their KV before the next step runs.

        Where groups keep the last few blocks only, it takes all or nothing: what each of them looks back to from `upto` must be cached, or
        come from outside with the KV of every group, as that of the `complete` blocks does.
        """

    def unload(self, cache: C, loaded: Loaded) -> C:
        """End that lease; the blocks stay cached."""

    def lend(self, cache: C, *, high: float, low: float, size: int) -> tuple[C, Any]:
        """Where more than the share `high` of the pool is in use, lend some of the blocks that would be evicted next, until `settle`.

        As many as bring it down to `low`, at most `size`. A loan is a tuple of arrays: first ids (0 pads) in the groups that keep every
        block, then generations. Not called where there are none.
        """

    def settle(self, cache: C, loan: Any, stored: Bool[Array, " size"]) -> C:
        """End a loan: what was `stored` elsewhere and nobody uses is free from now on."""


@runtime_checkable
class Scheduler(Protocol[S, C]):
    """Decides what the next step computes. Built around a cache object: tracing inlines it."""

    def init(self) -> S:
        """No sequences."""

    def step(self, state: S, cache: C, result: StepResult) -> tuple[S, C, StepPlan]:
        """Take in a result and plan the next step. Never moves prompt tokens, never matches prefixes."""

    def arrive(self, state: S, cache: C, arrivals: Arrivals) -> tuple[S, C]:
        """Take in new sequences, then admit waiting ones in policy order while there is room."""


class AttentionBatch(NamedTuple):
    """What attention needs to know of a step, of one KV group; a slice of `StepPlan` on the device.

    The first `num_single` rows have one new token each, at flat index = row.
    """

    positions: Int32[Array, " tokens"]
    query_start: Int32[Array, " rows_plus_one"]
    context_len: Int32[Array, " rows"]
    block_table: Int32[Array, "rows max_blocks"]
    slot_mapping: Int32[Array, " tokens"]
    num_single: Int32[Array, ""]
    num_rows: Int32[Array, ""]


@runtime_checkable
class AttentionBackend(Protocol[KV]):
    """Owns KV memory, its layout and the attention over it. Raises `NotImplementedError` with the reason where it cannot serve.

    `layout_id` names the byte layout of a block; it is part of every key under which a block leaves the device.
    """

    layout_id: str

    def init_kv(self, spec: KVGroupSpec, num_blocks: int) -> KV:
        """Zeroed memory for the blocks of one KV group."""

    def write(
        self,
        kv: KV,
        layer: int,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> KV:
        """Store K and V of the step's tokens; slot −1, or one beyond the pool, stores nothing. `layer` counts within the group.

        Of a `latent` group only K is stored, which is V too.
        """

    def attend(
        self,
        kv: KV,
        layer: int,
        q: Float[Array, "tokens q_heads head_dim"],
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float32[Array, " q_heads"] | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Causal attention of each token over its row's KV up to its own position. Pads may hold anything finite.

        What `KVGroupSpec` says of a group comes with the call: the last `window` tokens only, capped scores, a `sinks` score per head
        that takes part in the softmax and has no value. It is passed only where the group has it, so a backend may lack the
        argument; it is then not chosen for such a group.
        """

    def gather(self, kv: KV, block_ids: Int32[Array, " ids"]) -> UInt8[Array, "ids block_bytes"]:
        """All layers of each block as contiguous bytes."""

    def scatter(self, kv: KV, block_ids: Int32[Array, " ids"], data: UInt8[Array, "ids block_bytes"]) -> KV:
        """The inverse of `gather`; id −1 stores nothing."""


@runtime_checkable
class LayerAttention(Protocol):
    """How a layer reaches its KV: writes K and V, attends, hands the KV on."""

    def __call__(
        self,
        kv: Any,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        *,
        sinks: Float32[Array, " q_heads"] | None = None,
    ) -> tuple[Any, Float[Array, "tokens q_heads head_dim"]]:
        """`kv` is the layer's own. `sinks` only from layers of a group that has them."""


@runtime_checkable
class Layer(Protocol):
    """One layer of a model: a pure function of its weights. Layers of equal structure are compiled once."""

    def __call__(self, kv: Any, stream: Any, attention: LayerAttention) -> tuple[Any, Any]:
        """The layer's KV and the stream after it."""


@runtime_checkable
class Model(Protocol):
    """Weights and the pure functions they stand for. A forward pass is `begin`, every layer in order, `hidden`, `logits`."""

    def kv_groups(self, *, block_size: int, dtype: str) -> tuple[KVGroupSpec, ...]:
        """The KV this model keeps."""

    def begin(self, token_ids: Int32[Array, " tokens"], positions: Int32[Array, " tokens"]) -> Any:
        """The stream that enters the first layer: a pytree of arrays, of the same structure before and after every layer."""

    def layers(self) -> Sequence[Layer]:
        """The layers, as `flax.nnx` modules without mutable state."""

    def hidden(self, stream: Any) -> Float[Array, "tokens hidden"]:
        """Final hidden states, after the last norm."""

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float32[Array, "rows vocab"]:
        """Scores of the next token."""


@runtime_checkable
class Sampler(Protocol[S]):
    """Chooses tokens on the device and keeps what that needs per sequence."""

    def init(self, max_sequences: int, vocab_size: int) -> S:
        """State for no sequences."""

    def begin(self, state: S, arrivals: SamplingArrivals) -> S:
        """Take in the sampling parameters and prompts of new sequences."""

    def sample(
        self,
        state: S,
        logits: Float32[Array, "rows vocab"],
        sequence: Int32[Array, " rows"],
        position: Int32[Array, " rows"],
    ) -> tuple[S, Sampled]:
        """The next token of each row (`sequence` −1 pads), its scores, and the state that remembers it. `position`: index of the new token in its sequence."""


@runtime_checkable
class Engine(Protocol):
    """What a frontend talks to."""

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Outputs until the one with a finish reason. Closing the iterator early aborts the request.

        Raises:
            RequestError: The request cannot be served.
            OverloadedError: A queue is full.
            EngineDeadError: The step loop has ended.
        """

    def submit(self, requests: Sequence[EngineRequest]) -> Sequence[AsyncIterator[EngineOutput]]:
        """`generate` for several requests that are queued together: all, or none and every iterator raises (or this call does).

        A request whose iterator is never read must be aborted.
        """

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with `FinishReason.ABORT`. Unknown ids are ignored."""

    def stats(self) -> EngineStats:
        """A reading of the step loop. Never blocks."""


@runtime_checkable
class Clock(Protocol):
    """Time, so that tests and simulation can bring their own."""

    def now_s(self) -> float:
        """Seconds from an arbitrary start; never falls."""
