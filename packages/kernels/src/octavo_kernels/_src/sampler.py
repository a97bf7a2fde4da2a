"""`RowSampler`: one token for each row of a step, on the device, each row with its own parameters and its own random key.

Knows per-sequence parameters and what each sequence has said so far. What no row of a step asks for costs nothing: the
paths are chosen by `lax.cond`, so a step of greedy rows is one pass over the logits. Deliberately knows nothing of text, stop
strings or grammars; the host looks at the tokens afterwards.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int16, Int32, UInt32

from octavo_core.errors import ConfigError
from octavo_core.plan import Sampled, SamplingArrivals
from octavo_kernels._src import edits, vocab
from octavo_kernels._src.cut import everything, keep
from octavo_kernels._src.restrict import find_cut
from octavo_kernels._src.scores import score_tokens

MIN_TEMPERATURE: Final = 1e-5
"""Below it a row is greedy."""
MAX_COUNT: Final = 2**15 - 1


class SamplerParams(NamedTuple):
    """Sampling parameters of each sequence; the fields of `SamplingArrivals` that do not change while it lives."""

    temperature: Float32[Array, " sequences"]
    top_k: Int32[Array, " sequences"]
    top_p: Float32[Array, " sequences"]
    min_p: Float32[Array, " sequences"]
    presence_penalty: Float32[Array, " sequences"]
    frequency_penalty: Float32[Array, " sequences"]
    repetition_penalty: Float32[Array, " sequences"]
    seed: UInt32[Array, "sequences 2"]
    bias_ids: Int32[Array, "sequences max_bias"]
    bias_values: Float32[Array, "sequences max_bias"]
    stop_ids: Int32[Array, "sequences max_stop"]
    min_len: Int32[Array, " sequences"]
    num_logprobs: Int32[Array, " sequences"]


class SamplerState(NamedTuple):
    """What `RowSampler` remembers.

    Attributes:
        params: As they arrived.
        output_count: How often each token was sampled; stops rising at 32767. Kept only for sequences with a penalty.
        prompt_seen: Tokens of the prompt. Kept only for sequences with a penalty.
    """

    params: SamplerParams
    output_count: Int16[Array, "sequences vocab"]
    prompt_seen: Bool[Array, "sequences vocab"]


class RowSampler:
    """A `octavo_core.seams.Sampler`.

    In this order: `logit_bias`, stop ids banned below the minimum length, repetition, frequency and presence penalty; then the
    greatest score where temperature is 0, else temperature, top_k, top_p, min_p and one draw. Equal scores: the lowest id first.
    The draw depends on the row's seed, its position and its scores alone.

    Scores that are NaN or −inf count as the lowest, +inf as the highest; a row of nothing else gives some id inside the
    vocabulary. So does a row whose every token is banned.

    Args:
        max_logprobs: Alternatives reported for each token.
        max_bias: Entries of `logit_bias` per sequence.
        max_stop: Stop ids per sequence.
        max_arrivals: Sequences handed to one `begin`.

    Raises:
        ConfigError: For a negative size.
    """

    def __init__(self, *, max_logprobs: int = 20, max_bias: int = 300, max_stop: int = 32, max_arrivals: int = 8) -> None:
        sizes = {"max_logprobs": max_logprobs, "max_bias": max_bias, "max_stop": max_stop, "max_arrivals": max_arrivals}
        for name, size in sizes.items():
            if size < 0:
                raise ConfigError(f"{name} is at least 0, got {size}")
        self.max_logprobs = max_logprobs
        self.max_bias = max_bias
        self.max_stop = max_stop
        self.max_arrivals = max_arrivals

    def init(self, max_sequences: int, vocab_size: int) -> SamplerState:
        """State for no sequences.

        Raises:
            ConfigError: When more alternatives are wanted than there are tokens.

        Cost: 3 bytes per sequence and token of the vocabulary.
        """
        if self.max_logprobs > vocab_size:
            raise ConfigError(f"max_logprobs {self.max_logprobs} is more than the vocabulary's {vocab_size} tokens; lower it")
        params = SamplerParams(*(jnp.zeros((max_sequences, *shape), dtype) for shape, dtype in self._columns().values()))
        params = params._replace(bias_ids=params.bias_ids - 1, stop_ids=params.stop_ids - 1, num_logprobs=params.num_logprobs - 1)
        counts = jnp.zeros((max_sequences, vocab_size), jnp.int16)
        return SamplerState(params, counts, jnp.zeros((max_sequences, vocab_size), bool))

    def begin(self, state: SamplerState, arrivals: SamplingArrivals) -> SamplerState:
        """Take in the sampling parameters and prompts of new sequences.

        Cost: A few kilobytes per arrival; one pass over `vocab` and a scatter of the prompt for those with a penalty.
        """
        slots = jnp.where(arrivals.sequence < 0, len(state.output_count), arrivals.sequence)
        columns = {
            name: getattr(state.params, name).at[slots].set(getattr(arrivals, name), mode="drop") for name in SamplerParams._fields
        }
        wanted = (arrivals.sequence >= 0) & _has_penalty(arrivals)
        counts, seen = _forget_and_read(state.output_count, state.prompt_seen, arrivals, wanted)
        return SamplerState(SamplerParams(**columns), counts, seen)

    def empty_arrivals(self, max_len: int) -> SamplingArrivals:
        """Arrivals of nobody, in the shapes `begin` is compiled for: a template to fill, and what to warm up with."""
        shapes = {"sequence": ((), jnp.int32), "tokens": ((max_len,), jnp.int32), "prompt_len": ((), jnp.int32), **self._columns()}
        blank = {name: jnp.zeros((self.max_arrivals, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        for name in ("sequence", "bias_ids", "stop_ids", "num_logprobs"):
            blank[name] = blank[name] - 1
        for name in ("top_p", "repetition_penalty"):
            blank[name] = blank[name] + 1
        return SamplingArrivals(**blank)

    def sample(
        self,
        state: SamplerState,
        logits: Float32[Array, "rows vocab"],
        sequence: Int32[Array, " rows"],
        position: Int32[Array, " rows"],
    ) -> tuple[SamplerState, Sampled]:
        """The next token of each row and its scores among the model's raw scores. A sequence occurs at most once."""
        live = sequence >= 0
        params = SamplerParams(*(column[jnp.maximum(sequence, 0)] for column in state.params))
        is_random = live & (params.temperature >= MIN_TEMPERATURE)
        is_edited = live & (_has_penalty(params) | (params.bias_ids >= 0).any(axis=-1) | (position < params.min_len))
        token_ids = lax.cond(
            (is_random | is_edited).any(),
            lambda: _choose(_edit(state, params, logits, sequence, position, live), params, position, is_random),
            lambda: vocab.argmax(vocab.finite(logits)),
        )
        counts = _count(state.output_count, jnp.where(live & _has_penalty(params), sequence, -1), token_ids)
        return state._replace(output_count=counts), self._scored(logits, token_ids, live & (params.num_logprobs >= 0))

    def _scored(
        self, logits: Float32[Array, "rows vocab"], token_ids: Int32[Array, " rows"], wanted: Bool[Array, " rows"]
    ) -> Sampled:
        rows, k = len(token_ids), self.max_logprobs

        def nothing() -> tuple[jax.Array, ...]:
            zeros = jnp.zeros(rows, jnp.float32), jnp.zeros(rows, jnp.int32)
            return *zeros, jnp.zeros((rows, k), jnp.int32), jnp.zeros((rows, k), jnp.float32)

        return Sampled(token_ids, *lax.cond(wanted.any(), lambda: score_tokens(logits, token_ids, k), nothing))

    def _columns(self) -> dict[str, tuple[tuple[int, ...], jax.typing.DTypeLike]]:
        """Shape behind the first axis, and dtype, of each field of `SamplerParams`."""
        wide = {"seed": (2,), "bias_ids": (self.max_bias,), "bias_values": (self.max_bias,), "stop_ids": (self.max_stop,)}
        whole = {"top_k", "bias_ids", "stop_ids", "min_len", "num_logprobs"}
        kinds = {name: jnp.int32 if name in whole else jnp.float32 for name in SamplerParams._fields} | {"seed": jnp.uint32}
        return {name: (wide.get(name, ()), kinds[name]) for name in SamplerParams._fields}


def _has_penalty(params: SamplerParams | SamplingArrivals) -> Bool[Array, " entries"]:
    return (params.repetition_penalty != 1) | (params.frequency_penalty != 0) | (params.presence_penalty != 0)


def _forget_and_read(
    counts: Int16[Array, "sequences vocab"],
    seen: Bool[Array, "sequences vocab"],
    arrivals: SamplingArrivals,
    wanted: Bool[Array, " arrivals"],
) -> tuple[Int16[Array, "sequences vocab"], Bool[Array, "sequences vocab"]]:
    """Clear the counts of some arrivals and note the tokens of their prompts; a loop, so that the others cost nothing."""
    order = jnp.argsort(~wanted, stable=True)
    width = counts.shape[1]

    def one(i: Int32[Array, ""], state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        entry = order[i]
        slot = arrivals.sequence[entry]
        inside = jnp.arange(arrivals.tokens.shape[1]) < arrivals.prompt_len[entry]
        ids = jnp.where(inside, arrivals.tokens[entry], width)
        row = jnp.zeros(width, bool).at[ids].set(True, mode="drop")
        return state[0].at[slot].set(0), state[1].at[slot].set(row)

    return lax.fori_loop(0, wanted.sum(), one, (counts, seen))


def _count(
    counts: Int16[Array, "sequences vocab"], sequence: Int32[Array, " rows"], token_ids: Int32[Array, " rows"]
) -> Int16[Array, "sequences vocab"]:
    old = counts[jnp.maximum(sequence, 0), token_ids]
    new = jnp.minimum(old, MAX_COUNT - 1) + jnp.int16(1)
    return counts.at[jnp.where(sequence < 0, len(counts), sequence), token_ids].set(new, mode="drop")


def _edit(
    state: SamplerState,
    params: SamplerParams,
    logits: Float32[Array, "rows vocab"],
    sequence: Int32[Array, " rows"],
    position: Int32[Array, " rows"],
    live: Bool[Array, " rows"],
) -> Float32[Array, "rows vocab"]:
    scores = vocab.finite(logits)
    slots = jnp.maximum(sequence, 0)
    has_bias = live & (params.bias_ids >= 0).any(axis=-1)
    is_short = live & (position < params.min_len)
    has_penalty = live & _has_penalty(params)
    bias_ids = jnp.where(has_bias[:, None], params.bias_ids, -1)
    scores = lax.cond(has_bias.any(), lambda s: edits.add_bias(s, bias_ids, params.bias_values), lambda s: s, scores)
    scores = lax.cond(is_short.any(), lambda s: edits.ban(s, params.stop_ids, is_short), lambda s: s, scores)

    def penalised(scores: Float32[Array, "rows vocab"]) -> Float32[Array, "rows vocab"]:
        lowered = edits.penalise(
            scores,
            state.prompt_seen[slots],
            state.output_count[slots],
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        return jnp.where(has_penalty[:, None], lowered, scores)

    return lax.cond(has_penalty.any(), penalised, lambda s: s, scores)


def _choose(
    scores: Float32[Array, "rows vocab"],
    params: SamplerParams,
    position: Int32[Array, " rows"],
    is_random: Bool[Array, " rows"],
) -> Int32[Array, " rows"]:
    greedy = vocab.argmax(scores)
    drawn = lax.cond(is_random.any(), lambda: _draw(scores, params, position, is_random), lambda: greedy)
    return jnp.where(is_random, drawn, greedy)


def _draw(
    scores: Float32[Array, "rows vocab"],
    params: SamplerParams,
    position: Int32[Array, " rows"],
    is_random: Bool[Array, " rows"],
) -> Int32[Array, " rows"]:
    size = scores.shape[1]
    best = jnp.maximum(scores.max(axis=-1, keepdims=True), -vocab.HUGE)
    temperature = jnp.where(is_random, params.temperature, 1.0)[:, None]
    # Behind a barrier the distances are computed once, so that every later comparison sees the same bits.
    distance: Float32[Array, "rows lanes lane"] = lax.optimization_barrier(vocab.to_lanes((best - scores) / temperature, jnp.inf))  # type: ignore[no-untyped-call]
    top_k = jnp.where(is_random, params.top_k, 0)
    top_p = jnp.where(is_random, params.top_p, 1.0)
    min_p = jnp.where(is_random, params.min_p, 0.0)
    cut = lax.cond(
        ((top_k > 0) | (top_p < 1) | (min_p > 0)).any(),
        lambda: find_cut(distance, size, top_k, top_p, min_p),
        lambda: everything(len(scores)),
    )
    kept = jnp.where(keep(distance, cut), distance, jnp.inf)
    return jnp.minimum(_categorical(kept, params.seed, position), size - 1)


def _categorical(
    distance: Float32[Array, "rows lanes lane"], seed: UInt32[Array, "rows 2"], position: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """Draw an id with probability proportional to `exp(−distance)`: first its lane by the lane's mass, then itself within it.

    Both draws take the greatest of log-weight plus Gumbel noise. Noise is needed for `lanes + 128` entries of a row, not for the
    whole vocabulary, where making it would cost ten times the rest of the sampler (threefry on a CPU).
    """

    lanes, lane_size = distance.shape[1:]

    def noise(seed: UInt32[Array, "2"], position: Int32[Array, ""]) -> Float32[Array, " noise"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (lanes + lane_size,), jnp.float32)

    both = jax.vmap(noise)(seed, position)
    lane_noise, id_noise = both[:, :lanes], both[:, lanes:]
    log_mass = jnp.log(jnp.exp(-distance).sum(axis=-1))
    lane = jnp.argmax(log_mass + lane_noise, axis=-1).astype(jnp.int32)
    within = jnp.argmax(id_noise - vocab.lane_of(distance, lane), axis=-1).astype(jnp.int32)
    return lane * vocab.LANE + within
