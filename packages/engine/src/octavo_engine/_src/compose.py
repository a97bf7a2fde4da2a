"""The one module that names concrete components: from a config to a compiled engine core.

Touches disk, device memory and the compiler. Everything chosen here is told in the start-up table.

Size: one composition, read from top to bottom, of what every node has and what node 0 alone has.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from octavo_core.config import from_mapping
from octavo_core.errors import ConfigError
from octavo_core.plan import SamplingArrivals
from octavo_core.seams import AttentionBackend, Model, PrefixCache, Sampler, Scheduler
from octavo_core.specs import CacheSpec, KVGroupSpec
from octavo_core.wire import ModelCard
from octavo_engine._src import host, huge_pages, kv_events_config, plug, sizing, weights
from octavo_engine._src.cluster import Follower, Leader, join
from octavo_engine._src.command_buffers import command_buffers
from octavo_engine._src.compiles import CompileCounter
from octavo_engine._src.compose_tiers import build_tiers
from octavo_engine._src.core import EngineCore
from octavo_engine._src.device import DevicePrograms, DeviceState
from octavo_engine._src.kv_events import KVEvents
from octavo_engine._src.leading import FollowingRunner, LeadingRunner
from octavo_engine._src.logs import Logs
from octavo_engine._src.mesh import DividedAttention, device_mesh, local_group, put
from octavo_engine._src.planner import Planner
from octavo_engine._src.plug import build_prefix_cache, find_prefix_cache
from octavo_engine._src.process.flight import FlightRecorder
from octavo_engine._src.programs import Programs, kept_programs
from octavo_engine._src.recording import Recording
from octavo_engine._src.runner import ModelRunner
from octavo_engine._src.steps import Steps, compile_steps, num_programs
from octavo_engine._src.validate import MAX_BIAS, MAX_STOP
from octavo_engine.config import EngineConfig
from octavo_kernels import RowSampler, attention_backend, cpu_layers
from octavo_kvcache import RadixCache, audit, memory
from octavo_kvcache.policy import named_policy
from octavo_models import Placement
from octavo_models.checkpoints import Checkpoint, progress, resolve
from octavo_scheduler import ChunkedScheduler, SchedulerConfig

MAX_ARRIVALS = 8
MAX_EOS = 16
WAITING_SLOTS = 64
SWITCH_INTERVAL_S = 0.001
"""Seconds after which Python's threads hand over: the default of 5 ms would stand beside every step."""

Table = list[tuple[str, str, str]]
_OVERLAPS = {True: ("on", "the next step is planned and dispatched while one runs"), False: ("off", "--no-async-scheduling")}


@dataclasses.dataclass
class Built:
    """A compiled engine core and what is worth telling about it."""

    core: EngineCore
    card: ModelCard
    checkpoint: Checkpoint
    compiles: CompileCounter
    table: Table
    logs: Logs
    kv_events: KVEvents | None
    has_own_cache: bool = True
    leader: Leader | None = None

    @property
    def recompiles(self) -> int:
        """Compilations since it became ready."""
        return self.compiles.count

    def flush(self) -> None:
        """Hand the logs to the operating system."""
        self.logs.flush()

    def audit(self) -> list[str]:
        """What is wrong with the cache's books, where it is Octavo's own; call it when nothing runs."""
        while self.core.has_work:
            self.core.turn()
        cache = self.core.planner.state[1]
        return audit(cache, self.core.planner.spec) if self.has_own_cache else []

    def close(self) -> None:
        """Stop listening for compilations, publish what is left, close the logs."""
        self.compiles.close()
        if self.core.offload is not None:
            self.core.offload.close()
        if self.leader is not None:
            self.leader.close()
        if self.kv_events is not None:
            self.kv_events.close()
        self.logs.close()


def build_for_process(config: Mapping[str, Any], recorder: FlightRecorder) -> Built:
    """`build` for a process of its own, whose steps a recorder keeps."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return build(from_mapping(EngineConfig, config), recorder)


def build(config: EngineConfig, recorder: FlightRecorder | None = None) -> Built:
    """Load, size, compile.

    Raises:
        ConfigError: For settings that cannot work together.
        CheckpointError: For a model that cannot be read.
    """
    logs = Logs(config.step_log, config.request_log, recorder)
    kv_events: KVEvents | None = None
    try:
        chosen = kv_events_config.parse(config.kv_events_config)
        kv_events = KVEvents(chosen) if chosen.publishes else None
        return _build(config, logs, kv_events)
    except BaseException:
        if kv_events is not None:
            kv_events.close()
        logs.close()
        raise


def follow(config: EngineConfig) -> None:
    """Be one of several nodes, and not the first: load the model, then run what node 0 says until it ends.

    Raises:
        ConfigError: For settings that cannot work, or that differ from node 0's.
        CheckpointError: For a model that cannot be read.
        EngineDeadError: Node 0 cannot be reached, or has failed. Where it is silent the process ends, whatever it is doing.
    """
    if config.node_rank == 0:
        raise ConfigError("the node of rank 0 takes requests and follows nobody; give the others --node-rank 1 and above")
    _settle(config)
    node = join(config)
    assert isinstance(node, Follower)
    try:
        side = _device_side(config, [], node)
        FollowingRunner(ModelRunner(side.programs, side.state, max_blocks=side.spec.max_blocks), node).run()
        node.leave()
    except BaseException as error:
        node.failed(error)
        raise
    finally:
        node.close()


def _settle(config: EngineConfig) -> None:
    host.keep_compiled_programs(config.compilation_cache_dir)
    host.run_cpu_programs_in_place()
    host.keep_freed_memory()


def _build(config: EngineConfig, logs: Logs, kv_events: KVEvents | None) -> Built:
    if config.node_rank:
        raise ConfigError(
            f"--node-rank {config.node_rank} takes no requests: start it with `octavo serve --headless` and the same options"
        )
    _settle(config)
    leader = join(config)
    assert not isinstance(leader, Follower)
    try:
        return _build_joined(config, logs, kv_events, leader)
    except BaseException:
        if leader is not None:
            leader.close()
        raise


class _DeviceSide(NamedTuple):
    """What every node has: the model, and the programs and memory of its devices."""

    checkpoint: Checkpoint
    loaded: weights.Loaded
    attention: AttentionBackend[Any]
    groups: tuple[KVGroupSpec, ...]
    spec: CacheSpec
    card: ModelCard
    programs: DevicePrograms
    state: DeviceState
    nobody: SamplingArrivals
    seqs: int
    on_cpu: bool
    pads_free: bool


def _device_side(config: EngineConfig, table: Table, node: Leader | Follower | None) -> _DeviceSide:
    mesh = device_mesh(config.tensor_parallel_size, config.nnodes)
    checkpoint = resolve(config.model, revision=config.revision, download_dir=config.download_dir, offline=config.offline)
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    table.append(("device", f"{device.device_kind} ({device.platform})", f"{len(jax.devices())} visible to JAX {jax.__version__}"))
    table.append(("model", checkpoint.name, f"{checkpoint.config.architecture} from {checkpoint.path.name}"))
    placement = None if mesh is None else Placement(mesh, divide_experts=config.expert_parallel)
    loaded = weights.load(config, checkpoint, _dtype(config, checkpoint, on_cpu), cpu_layers, table, placement)
    model = loaded.model

    seqs, why_seqs = sizing.num_sequences(config, on_cpu=on_cpu)
    free_bytes = host.free_bytes() if node is None else node.least(host.free_bytes())
    groups, spec = _size_cache(config, checkpoint, model, loaded.kv_dtype, seqs, on_cpu, free_bytes, table)
    table.append(("sequences", str(seqs), why_seqs))
    attention = _attention(config, groups, mesh, table)
    card = _card(config, checkpoint, spec)
    pads_free = loaded.is_packed and loaded.is_native(attention)
    per_segment = 1 if on_cpu and not pads_free else len(model.layers())
    programs, nobody = _programs(config, model, groups, attention, card, spec, per_segment, table)
    _check_room(spec, memory.pool_bytes(groups, spec.num_blocks), card)
    state = _device_state(programs, spec, card, mesh)
    return _DeviceSide(checkpoint, loaded, attention, groups, spec, card, programs, state, nobody, seqs, on_cpu, pads_free)


def _build_joined(config: EngineConfig, logs: Logs, kv_events: KVEvents | None, leader: Leader | None) -> Built:
    started_s = time.monotonic()
    table: Table = []
    make_cache, make_scheduler = _prefix_cache(config, table), _scheduler(config, table)
    side = _device_side(config, table, leader)
    checkpoint, loaded, attention, groups, spec, card, programs, state, nobody, seqs, on_cpu, pads_free = side
    if leader is not None:
        told = f"rank 0 of them, --master-port {config.master_port}"
        table.append(("nodes", str(config.nnodes), f"{told}; one that is silent for {config.node_timeout_s:g} s counts as dead"))
    cache = make_cache(spec)
    in_thread = on_cpu and config.async_scheduling
    if leader is None:
        kept = kept_programs(config, checkpoint.path, checkpoint.config, groups, spec, card, [row[:2] for row in table])
        runner = ModelRunner(programs, state, max_blocks=spec.max_blocks, kept=kept, in_thread=in_thread)
    else:  # stored programs are one node's
        kept = Programs(None)
        runner = LeadingRunner(programs, state, max_blocks=spec.max_blocks, leader=leader, in_thread=in_thread)
    planner = _compile(config, runner, cache, make_scheduler, nobody, seqs, on_cpu, pads_free, kept, table)
    compiles = CompileCounter()
    template = jax.tree.map(np.array, nobody)
    table.append(("overlap", *_OVERLAPS[config.async_scheduling]))
    if kv_events is not None:
        kv_events.begin(groups, spec.block_size)
        table.append(("KV events", *kv_events.told))
    offload = build_tiers(config, checkpoint, loaded, attention, runner, planner, cache, table)
    recording = _recording(planner, logs.recorder)
    core = EngineCore(
        config,
        card,
        planner,
        runner,
        template,
        logs,
        kv_events,
        overlap=config.async_scheduling,
        offload=offload,
        recording=recording,
    )
    if on_cpu:
        table.append(("memory pages", *huge_pages.begin((programs.params, runner.kv))))
    table.append(("start", f"{time.monotonic() - started_s:.1f} s", "from nothing to ready"))
    host.return_freed_memory()
    compiles.arm()
    return Built(core, card, checkpoint, compiles, table, logs, kv_events, config.prefix_cache is None, leader)


def _recording(planner: Planner, recorder: FlightRecorder | None) -> Recording | None:
    """What makes a flight record repeatable; of a scheduler of somebody else's nothing is known."""
    scheduler = planner.scheduler
    return Recording(planner, scheduler.config, recorder) if recorder is not None and type(scheduler) is ChunkedScheduler else None


def _programs(
    config: EngineConfig,
    model: Model,
    groups: tuple[KVGroupSpec, ...],
    attention: AttentionBackend[Any],
    card: ModelCard,
    spec: CacheSpec,
    layers_per_segment: int,
    table: Table,
) -> tuple[DevicePrograms, SamplingArrivals]:
    """What a step runs, and new sequences for it of which there are none."""
    own = RowSampler(max_logprobs=card.max_logprobs, max_bias=MAX_BIAS, max_stop=MAX_STOP + MAX_EOS, max_arrivals=MAX_ARRIVALS)
    sampler = _sampler(config, own, table)
    programs = DevicePrograms.of(
        model, groups, attention, sampler, max_logprobs=card.max_logprobs, layers_per_segment=layers_per_segment
    )
    return programs, own.empty_arrivals(spec.max_len)


def _device_state(programs: DevicePrograms, spec: CacheSpec, card: ModelCard, mesh: Mesh | None) -> DeviceState:
    """Empty, and on a mesh whole on every device but for the KV."""
    small = programs.sampler.init(spec.max_sequences, card.vocab_size), jnp.zeros(spec.max_sequences, jnp.int32)
    return DeviceState(programs.init_kv(spec.num_blocks), *(small if mesh is None else put(small, mesh)))


def _dtype(config: EngineConfig, checkpoint: Checkpoint, on_cpu: bool) -> tuple[str, str]:
    if config.dtype != "auto":
        return config.dtype, "--dtype"
    wanted = checkpoint.config.dtype
    if wanted == "float32":
        return "float32", "the checkpoint is float32"
    if on_cpu and not host.has_bf16_units():
        return "float32", f"the checkpoint is {wanted}, but this CPU multiplies float32 faster"
    return "bfloat16", f"the checkpoint is {wanted}"


def _size_cache(
    config: EngineConfig, checkpoint: Checkpoint, model: Model, dtype: str, seqs: int, on_cpu: bool, free_bytes: int, table: Table
) -> tuple[tuple[KVGroupSpec, ...], CacheSpec]:
    kv_dtype = config.kv_dtype(dtype)
    groups = model.kv_groups(block_size=config.block_size, dtype=kv_dtype)
    each = sum(memory.block_bytes(group) for group in groups)
    blocks, why = sizing.num_blocks(config, each, free_bytes, on_cpu=on_cpu)
    own_len = checkpoint.config.max_position_embeddings
    wanted = config.max_model_len or own_len
    capacity = (blocks - 1) * config.block_size
    max_len = min(wanted, capacity)
    reason = "--max-model-len" if config.max_model_len else "the model's own"
    table.append(
        ("context", f"{max_len} tokens", reason if max_len == wanted else f"the KV pool holds no more; {reason} is {wanted}")
    )
    if wanted > own_len:
        table.append(("context warning", f"{wanted} > {own_len}", "longer than the model was made for"))
    table.append(("KV pool", f"{blocks} blocks of {config.block_size} tokens, {blocks * each / 2**20:.0f} MiB {kv_dtype}", why))
    max_blocks = math.ceil(max_len / config.block_size)
    spec = CacheSpec(
        num_blocks=(blocks,) * len(groups),
        block_size=config.block_size,
        max_sequences=seqs + min(seqs, WAITING_SLOTS),
        max_blocks=max_blocks,
        kinds=tuple(group.kind for group in groups),
        windows=tuple(group.window or 0 for group in groups),
    )
    return groups, spec


def _attention(config: EngineConfig, groups: tuple[KVGroupSpec, ...], mesh: Mesh | None, table: Table) -> AttentionBackend[Any]:
    chosen = attention_backend(config.attention_backend, tuple(local_group(group, mesh) for group in groups))
    skipped = "; ".join(f"{p.name}: {p.reason}" for p in chosen.passed_over) or "first in order that can serve"
    table.append(("attention", chosen.name, skipped))
    if (platform := jax.local_devices()[0].platform) != "cpu":
        table.append(("command buffers", *command_buffers(platform, os.environ.get("XLA_FLAGS", ""))))
    if mesh is None:
        return chosen.backend
    divided = "whole experts and heads" if config.expert_parallel else "heads and widths"
    table.append(("devices", str(mesh.size), f"--tensor-parallel-size; {divided} are divided among them"))
    return DividedAttention(chosen.backend, mesh)


def _prefix_cache(config: EngineConfig, table: Table) -> Callable[[CacheSpec], PrefixCache[Any]]:
    """Octavo's own, or the one that was asked for."""
    name, shares = config.prefix_cache, _shares(config.prefix_cache_quotas)
    if name is None:
        policy = named_policy(config.prefix_cache_policy)
        table.append(("eviction", config.prefix_cache_policy, "--prefix-cache-policy"))
        return lambda spec: RadixCache(spec, policy=policy, quotas=tuple(int(share * spec.usable_blocks) for share in shares))
    make = find_prefix_cache(name)
    table.append(("prefix cache", name, "--prefix-cache"))
    return lambda spec: build_prefix_cache(name, make, spec)


def _scheduler(config: EngineConfig, table: Table) -> Callable[[SchedulerConfig, PrefixCache[Any]], Scheduler[Any, Any]]:
    """Octavo's own, or the one that was asked for."""
    name = config.scheduler
    if name is None:
        return ChunkedScheduler
    make = plug.find("--scheduler", name, "a SchedulerConfig and a PrefixCache")
    table.append(("scheduler", name, "--scheduler"))
    return lambda chosen, cache: plug.build("--scheduler", name, Scheduler, lambda: make(chosen, cache), str(chosen))


def _sampler(config: EngineConfig, own: RowSampler, table: Table) -> Sampler[Any]:
    """Octavo's own, or the one that was asked for, made for the same sizes."""
    name = config.sampler
    if name is None:
        return own
    sizes = {size: getattr(own, size) for size in ("max_logprobs", "max_bias", "max_stop", "max_arrivals")}
    make = plug.find("--sampler", name, "max_logprobs, max_bias, max_stop and max_arrivals")
    table.append(("sampler", name, "--sampler"))
    sampler: Sampler[Any] = plug.build("--sampler", name, Sampler, lambda: make(**sizes), str(sizes))
    return sampler


def _shares(text: str | None) -> tuple[float, ...]:
    """What `--prefix-cache-quotas` says.

    Raises:
        ConfigError: It is no list of shares of one pool.
    """
    try:
        shares = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        shares = (-1.0,)
    if not all(0 <= share <= 1 for share in shares) or sum(shares) > 1:
        raise ConfigError(
            f"--prefix-cache-quotas is a list of shares from 0 to 1, together at most 1, such as 0.25,0.5; got {text}"
        )
    return shares


def _check_room(spec: CacheSpec, pool: int, card: ModelCard) -> None:
    """Refuse a pool of so many bytes and a sampler's state that memory cannot hold, before anything is allocated."""
    sampler = 3 * spec.max_sequences * card.vocab_size
    free = host.free_bytes()
    if pool + sampler > free:
        raise ConfigError(
            f"the KV pool takes {pool / 2**30:.1f} GiB and sampling for {spec.max_sequences} sequences {sampler / 2**30:.1f} GiB, but "
            f"{free / 2**30:.1f} GiB are free; lower --kv-cache-memory-bytes, --num-gpu-blocks-override or --max-num-seqs"
        )


def _card(config: EngineConfig, checkpoint: Checkpoint, spec: CacheSpec) -> ModelCard:
    capacity = min((n - 1) * spec.block_size for n in spec.num_blocks)
    wanted = config.max_model_len or checkpoint.config.max_position_embeddings
    vocab = checkpoint.config.vocab_size
    honour = config.generation_config == "auto"
    return ModelCard(
        name=checkpoint.name,
        root=str(checkpoint.path),
        max_model_len=min(wanted, capacity, spec.max_len),
        vocab_size=vocab,
        eos_token_ids=checkpoint.generation.eos_token_ids[:MAX_EOS],
        sampling_defaults=checkpoint.generation.sampling_defaults if honour else {},
        max_logprobs=vocab if config.max_logprobs == -1 else min(config.max_logprobs, vocab),
    )


def _compile(
    config: EngineConfig,
    runner: ModelRunner,
    cache: PrefixCache[Any],
    make_scheduler: Callable[[SchedulerConfig, PrefixCache[Any]], Scheduler[Any, Any]],
    nobody: SamplingArrivals,
    seqs: int,
    on_cpu: bool,
    pads_free: bool,
    kept: Programs,
    table: Table,
) -> Planner:
    start_s = time.monotonic()
    alone = on_cpu and (pads_free or runner.programs.params[0].dtype == jnp.float32)
    with progress("compiling", num_programs(config, seqs, alone=alone, pads_free=pads_free), unit="programs") as advance:
        runner.compile_begin(nobody)
        steps = compile_steps(runner, config, seqs, advance, on_cpu=on_cpu, alone=alone, pads_free=pads_free, kept=kept)
        planner = _planner(config, cache, make_scheduler, seqs, on_cpu, steps, kept)
        table.append(
            (
                "chunks",
                _chunk_policy(config, on_cpu),
                "--chunk-policy" if config.chunk_policy != "auto" else "default of this device",
            )
        )
        planner.compile()
    table.append(("token budget", f"{steps.budget} tokens", steps.why))
    table.append(("programs", *kept.told))
    shapes = ", ".join(f"{b.tokens}x{b.rows}" for b in runner.shapes)
    table.append(("step shapes", shapes, f"tokens x rows, compiled in {time.monotonic() - start_s:.1f} s"))
    return planner


def _chunk_policy(config: EngineConfig, on_cpu: bool) -> str:
    return ("slo" if on_cpu else "adaptive") if config.chunk_policy == "auto" else config.chunk_policy


def _planner(
    config: EngineConfig,
    cache: PrefixCache[Any],
    make_scheduler: Callable[[SchedulerConfig, PrefixCache[Any]], Scheduler[Any, Any]],
    max_num_seqs: int,
    on_cpu: bool,
    steps: Steps,
    kept: Programs,
) -> Planner:
    chosen = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        token_budget=steps.budget,
        chunk_size=config.chunked_prefill_size,
        chunk_policy=_chunk_policy(config, on_cpu),
        target_itl_ms=config.target_itl_ms,
        slo_prior_us=steps.cost_us,
        step_sizes=steps.sizes,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_arrivals=MAX_ARRIVALS,
        policy=config.scheduling_policy,
        tenant_weights=config.weights(),
        reservation=config.kv_reservation,
        watermark_blocks=max(1, cache.spec.num_blocks[0] // 100),
    )
    # What steps cost is a value of the scheduler's state; everything else in its settings is built into its programs.
    built_in = dataclasses.replace(chosen, slo_prior_us=(0, 0, 0))
    return Planner(
        make_scheduler(chosen, cache), cache, max_arrivals=MAX_ARRIVALS, max_rows=max_num_seqs, kept=kept.narrowed(built_in)
    )
