"""What can be chosen about the engine, in vLLM's names. Imports no jax: a command line is built from it before anything starts."""

from __future__ import annotations

import dataclasses
from typing import Final

from octavo_core.config import option
from octavo_core.errors import ConfigError
from octavo_engine._src import kv_events_config, kv_offload_config

MODEL: Final = "model"
CACHE: Final = "KV cache"
SCHEDULING: Final = "scheduling"
BACKENDS: Final = "backends"
NODES: Final = "several nodes"
LOGS: Final = "logs"
BLOCK_SIZES: Final = (16, 32, 64)
KV_DTYPES: Final = {
    "bfloat16": "bfloat16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""NumPy name of what each `--kv-cache-dtype` stores."""
KV_DTYPE_HELP: Final = "Type of stored KV; auto: the model's; the fp8 ones (fp8 is fp8_e4m3) with a scale for each token and head"
MAX_TENANTS: Final = 64
"""Tenants told apart by a fair schedule that was given no weights; those beyond count as the last."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is started with. Zero or None: chosen at start, and shown in the start-up table.

    Size: a field for each flag.

    Raises:
        ConfigError: For a value out of range, or a feature this version does not have; the message names the flag.
    """

    model: str | None = option(None, "Folder, .gguf file or hub id; without it SmolLM2-135M-Instruct", group=MODEL)
    revision: str | None = option(None, "Branch, tag or commit of a hub repository", group=MODEL)
    download_dir: str | None = option(None, "Where hub files are kept", group=MODEL)
    offline: bool = option(False, "Never ask the hub, use what is on disk", group=MODEL)
    dtype: str = option("auto", "Arithmetic of the model", group=MODEL, choices=("auto", "bfloat16", "float32"))
    quantization: str = option(
        "auto",
        "Weights in dots: auto (the checkpoint's own 4- and 8-bit blocks where kernels serve them), none, int8 or q4",
        group=MODEL,
        choices=("auto", "none", "int8", "q4"),
    )
    max_model_len: int = option(0, "Most tokens of prompt and answer; 0: what the model was made for", group=MODEL)
    generation_config: str = option(
        "auto", "Honour generation_config.json, or use neutral sampling defaults", group=MODEL, choices=("auto", "vllm", "neutral")
    )
    seed: int = option(0, "Seed of requests without one; 0: from the operating system", group=MODEL)
    skip_tokenizer_init: bool = option(False, "Token ids in and out, without a tokenizer", group=MODEL)
    max_logprobs: int = option(20, "Most alternatives per token in logprobs; -1: the whole vocabulary", group=MODEL)

    block_size: int = option(32, "Tokens in a KV block: 16, 32 or 64", group=CACHE)
    gpu_memory_utilization: float = option(0.9, "Share of free device memory for weights and KV, 0..1", group=CACHE)
    kv_cache_memory_bytes: int = option(0, "Bytes of the KV pool, such as 512M; overrides the share", group=CACHE)
    num_gpu_blocks_override: int = option(0, "KV blocks, whatever the memory", group=CACHE)
    kv_cache_dtype: str = option("auto", KV_DTYPE_HELP, group=CACHE, choices=("auto", *KV_DTYPES))
    enable_prefix_caching: bool = option(True, "Reuse KV of equal prefixes", group=CACHE)
    kv_events_config: str | None = option(
        None, 'Publish KV events over ZeroMQ: JSON such as {"enable_kv_cache_events": true}', group=CACHE, metavar="JSON"
    )
    kv_offload: str | None = option(
        None,
        "Tiers of KV below the device, such as host=4GiB,disk=/nvme/kv:50GiB; every block read back is verified",
        group=CACHE,
        metavar="TIERS",
    )
    kv_store_key_file: str | None = option(
        None, "File with the key of the store of --kv-offload remote=", group=CACHE, metavar="FILE"
    )
    kv_store_tls: str | None = option(None, "Mutual TLS with that store: three PEM files CERT,KEY,CA", group=CACHE, metavar="FILES")
    cpu_offload_gb: float = option(0.0, "GiB of host memory for KV below the device; short for --kv-offload host=", group=CACHE)

    max_num_seqs: int = option(0, "Most sequences in a step", group=SCHEDULING)
    max_num_batched_tokens: int = option(0, "Most new tokens in a step", group=SCHEDULING)
    chunked_prefill_size: int = option(0, "Most prompt tokens of one sequence in a step; 0: the budget", group=SCHEDULING)
    chunk_policy: str = option(
        "auto",
        "How much prompt a step takes: fixed, adaptive (less the more sequences decode), or slo (what keeps steps short while "
        "sequences decode); auto: slo on a CPU, adaptive elsewhere",
        group=SCHEDULING,
        choices=("auto", "fixed", "adaptive", "slo"),
    )
    target_itl_ms: int = option(
        0, "Longest step wanted while sequences decode, with --chunk-policy slo; 0: some decode steps", group=SCHEDULING
    )
    max_num_partial_prefills: int = option(
        0, "Most sequences whose prompts are computed in one step; 0: no bound", group=SCHEDULING
    )
    max_long_partial_prefills: int = option(1, "Of these, at most so many long ones", group=SCHEDULING)
    long_prefill_token_threshold: int = option(
        0,
        "Prompts with more tokens to compute are long: they take at most so many a step, and shorter ones pass them; 0: none is",
        group=SCHEDULING,
    )
    enable_chunked_prefill: bool = option(True, "Prompts are always computed in chunks", group=SCHEDULING)
    scheduling_policy: str = option(
        "fcfs",
        "Who goes first: by arrival; priority; longest cached prefix (lpm); least served tenant (fair); earliest deadline (edf)",
        group=SCHEDULING,
        choices=("fcfs", "priority", "lpm", "fair", "edf"),
    )
    tenant_weights: str | None = option(
        None, "Shares of the tenants under fair, relative to one another, such as 1,3; default: all alike", group=SCHEDULING
    )
    kv_reservation: str = option(
        "optimistic",
        "KV kept for what running sequences may still write: none, an estimate, or all of it (guaranteed: nobody is preempted)",
        group=SCHEDULING,
        choices=("none", "optimistic", "guaranteed"),
    )
    max_num_queued_reqs: int = option(1024, "Sequences that may wait before new ones get 503", group=SCHEDULING)
    max_num_queued_tokens: int = option(0, "Prompt tokens that may wait before new ones get 503; 0: no bound", group=SCHEDULING)
    max_queue_s: float = option(
        0.0, "Seconds a sequence may wait for its first step before it ends with an error; 0: no bound", group=SCHEDULING
    )
    async_scheduling: bool = option(True, "Plan the next step while one runs", group=SCHEDULING)

    attention_backend: str = option("auto", "auto, cpu, xla, reference, or my.module:Class", group=BACKENDS)
    layer_backend: str = option(
        "auto", "Layers in native code where they serve (cpu), or through XLA", group=BACKENDS, choices=("auto", "cpu", "xla")
    )
    model_class: str | None = option(
        None, "Another model for the checkpoint's configuration, by dotted name", group=BACKENDS, metavar="MODULE:NAME"
    )
    scheduler: str | None = option(
        None, "Another scheduler, by dotted name; default: octavo_scheduler's", group=BACKENDS, metavar="MODULE:NAME"
    )
    sampler: str | None = option(
        None, "Another sampler, by dotted name; default: octavo_kernels'", group=BACKENDS, metavar="MODULE:NAME"
    )
    prefix_cache: str | None = option(
        None, "Another prefix cache, by dotted name; default: octavo_kvcache's", group=BACKENDS, metavar="MODULE:NAME"
    )
    prefix_cache_policy: str = option(
        "two-lifetimes",
        "Which cached blocks are evicted first: two-lifetimes, lru, lfu, fifo, priority or cost",
        group=BACKENDS,
    )
    prefix_cache_quotas: str | None = option(
        None,
        "Share of the KV pool that each tenant keeps cached whatever others do, such as 0.25,0.5; default: there are no tenants",
        group=BACKENDS,
        metavar="SHARES",
    )
    tensor_parallel_size: int = option(1, "Devices among which heads and widths are divided", group=BACKENDS, aliases=("-tp",))
    expert_parallel: bool = option(
        False, "Divide whole experts among the devices, not each of them", group=BACKENDS, aliases=("--enable-expert-parallel",)
    )
    nnodes: int = option(
        1, "Machines that compute one model together; --tensor-parallel-size counts the devices of all", group=NODES
    )
    node_rank: int = option(0, "Which of them this one is; 0 plans and takes requests", group=NODES)
    master_addr: str = option("127.0.0.1", "Where the node of rank 0 is reached", group=NODES)
    master_port: int = option(29501, "Its port for plans; JAX's own is the next one", group=NODES)
    nodes_key_file: str | None = option(
        None, "File with the key that all nodes share; default: the variable OCTAVO_NODES_KEY", group=NODES, metavar="FILE"
    )
    headless: bool = option(False, "This node takes no requests: every one but rank 0", group=NODES)
    distributed_timeout_seconds: int = option(300, "Longest wait for the other nodes at start", group=NODES)
    node_timeout_s: float = option(20.0, "Seconds of silence after which a node counts as dead", group=NODES)
    compilation_cache_dir: str | None = option(
        None, "Where compiled programs are kept; 'off' keeps none; default: ~/.cache/octavo/compiled", group=BACKENDS
    )

    step_log: str | None = option(None, "Append one JSON line per step to this file", group=LOGS, metavar="FILE")
    request_log: str | None = option(None, "Append one JSON line per finished sequence to this file", group=LOGS, metavar="FILE")

    def __post_init__(self) -> None:
        self._refuse_what_is_missing()
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"--block-size is one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block_size}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization is above 0 and at most 1, got {self.gpu_memory_utilization}")
        if self.max_logprobs < -1:
            raise ConfigError(f"--max-logprobs is at least 0, or -1 for the whole vocabulary, got {self.max_logprobs}")
        if self.num_gpu_blocks_override == 1:
            raise ConfigError("--num-gpu-blocks-override is at least 2: one block is reserved")
        kv_events_config.parse(self.kv_events_config)
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} is at least 0, got {getattr(self, name)}")
        if not self.max_queue_s >= 0:
            raise ConfigError(f"--max-queue-s is at least 0, got {self.max_queue_s}")
        self.weights()
        self._check_nodes()

    def _check_nodes(self) -> None:
        """Settings of several nodes that fit together."""
        if self.nnodes < 1 or not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"--node-rank is 0 to --nnodes less one, got --node-rank {self.node_rank} --nnodes {self.nnodes}")
        if self.headless and self.node_rank == 0:
            raise ConfigError("--headless is for nodes of --node-rank 1 and above: the node of rank 0 takes the requests")
        if self.tensor_parallel_size % self.nnodes:
            raise ConfigError(
                f"--tensor-parallel-size counts the devices of all nodes, a multiple of --nnodes {self.nnodes}; got {self.tensor_parallel_size}"
            )
        if self.nnodes > 1 and kv_offload_config.parse(self.kv_offload, self.cpu_offload_gb).is_wanted:
            flag = "--kv-offload" if self.kv_offload else "--cpu-offload-gb"
            raise ConfigError(f"{flag} serves one node: tiers of KV below the device are not divided among --nnodes {self.nnodes}")
        if not 1 <= self.master_port <= 65534:
            raise ConfigError(f"--master-port is 1 to 65534 (the next port is used too), got {self.master_port}")
        if self.distributed_timeout_seconds < 1 or not self.node_timeout_s >= 3:
            raise ConfigError("--distributed-timeout-seconds is at least 1, --node-timeout-s at least 3")

    def weights(self) -> tuple[int, ...]:
        """`tenant_weights`, read.

        Raises:
            ConfigError: They are not whole numbers of 1 to 1000.
        """
        words = (self.tenant_weights or ",".join(["1"] * MAX_TENANTS)).split(",")
        if not all(word.strip().isdecimal() and 1 <= int(word) <= 1000 for word in words):
            raise ConfigError(f"--tenant-weights has whole numbers of 1 to 1000 such as 1,3, got '{self.tenant_weights}'")
        return tuple(int(word) for word in words)

    def kv_dtype(self, own: str) -> str:
        """NumPy name of a stored element of KV; `own` is the model's."""
        return KV_DTYPES.get(self.kv_cache_dtype, own)

    def _refuse_what_is_missing(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"--tensor-parallel-size is at least 1, got {self.tensor_parallel_size}")
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError("--expert-parallel divides experts among the devices of --tensor-parallel-size, which is 1; raise it")
        if self.kv_cache_dtype not in ("auto", *KV_DTYPES):
            raise ConfigError(f"--kv-cache-dtype is one of auto, {', '.join(KV_DTYPES)}, got '{self.kv_cache_dtype}'")
        tiers = kv_offload_config.parse(self.kv_offload, self.cpu_offload_gb)
        if tiers.is_wanted and not self.enable_prefix_caching:
            raise ConfigError("--kv-offload keeps cached prefixes; leave out --no-enable-prefix-caching")
        kv_offload_config.check_store(tiers, self.kv_store_key_file, self.kv_store_tls)
        if not self.enable_chunked_prefill:
            raise ConfigError("--enable-chunked-prefill=false is not supported: prompts are always computed in chunks")


_COUNTS: Final = (
    "max_model_len",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "max_num_seqs",
    "max_num_batched_tokens",
    "chunked_prefill_size",
    "target_itl_ms",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "long_prefill_token_threshold",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "seed",
)
