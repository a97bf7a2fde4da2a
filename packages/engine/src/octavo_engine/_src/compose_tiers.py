"""The part of composing that is about tiers below the device: names `octavo_offload`, touches disk, host memory and the compiler."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax

from octavo_core.errors import ConfigError
from octavo_core.keys import tier_root
from octavo_core.seams import AttentionBackend, LoadingCache, PrefixCache
from octavo_engine._src import kv_offload_config
from octavo_engine._src.block_mover import BlockMover
from octavo_engine._src.kv_facts import kv_facts
from octavo_engine._src.lending import Lending
from octavo_engine._src.offload import Offload
from octavo_engine._src.planner import Planner
from octavo_engine._src.runner import ModelRunner
from octavo_engine._src.weights import Loaded
from octavo_engine.config import EngineConfig
from octavo_models.checkpoints import Checkpoint
from octavo_offload import Files, RemoteConfig, TieredStore, content_digest, gds_files, open_tiers, read_key, read_tls

Table = list[tuple[str, str, str]]


def build_tiers(
    config: EngineConfig,
    checkpoint: Checkpoint,
    loaded: Loaded,
    attention: AttentionBackend[Any],
    runner: ModelRunner,
    planner: Planner,
    cache: PrefixCache[Any],
    table: Table,
) -> Offload | None:
    """Tiers below the device, and the programs that move blocks; None where none are wanted.

    Raises:
        ConfigError: The cache, the model or the folder does not allow it.
    """
    tiers = kv_offload_config.parse(config.kv_offload, config.cpu_offload_gb)
    if not tiers.is_wanted:
        return None
    started_s, spec = time.monotonic(), planner.spec
    checked = _check(cache)
    mover = BlockMover(runner)
    facts = kv_facts(config, checkpoint, loaded, attention, spec, mover.piece_bytes, content_digest(checkpoint.weight_files))
    root = functools.cache(lambda namespace: tier_root(namespace, **facts))  # type: ignore[arg-type]
    on_cpu = jax.default_backend() == "cpu"
    try:
        store = open_tiers(
            mover.piece_bytes,
            host_bytes=tiers.host_bytes,
            disk=tiers.disk,
            remote=_remote(config, tiers.remote),
            identity=root(b""),
            lock=not on_cpu,
            policy=tiers.host_policy,
            files=_files(tiers),
        )
    except OSError as error:
        raise ConfigError(f"--kv-offload: the tiers cannot be opened: {error}; choose another folder or size") from None
    table += _told(store, tiers, sum(mover.piece_bytes))
    offload = Offload(
        store,
        mover,
        Lending(planner, checked),
        spec,
        root,
        token_s=1e-3 if on_cpu else 2e-5,
    )
    table.append(("KV tiers", f"{time.monotonic() - started_s:.1f} s", "weights digested, folder read, programs compiled"))
    return offload


def _told(store: TieredStore, tiers: kv_offload_config.Tiers, block_bytes: int) -> Table:
    """What each tier got of the system."""
    host_size = store.host.capacity().total_bytes
    told = f"{store.host.slab.told}; {tiers.host_policy}; blocks of {block_bytes} bytes"
    lines = [("KV host tier", f"{host_size / 2**20:.0f} MiB", told)]
    if store.disk is not None and tiers.disk is not None:
        lines.append(("KV disk tier", f"{tiers.disk[0]}, {tiers.disk[1] / 2**20:.0f} MiB", store.disk.told))
    if tiers.remote:
        lines.append(("KV remote tier", tiers.remote, store.lower[-1].told))
    return lines


def _files(tiers: kv_offload_config.Tiers) -> Files | None:
    """The way to the disk that was asked for; None: the best that works."""
    if tiers.disk is None or tiers.disk_way == "auto":
        return None
    try:
        return gds_files(tiers.disk[0])
    except OSError as error:
        raise ConfigError(
            f"--kv-offload disk=...:gds_mt does not work here: {error.strerror or error}; without :gds_mt the disk is reached by what works"
        ) from None


def _remote(config: EngineConfig, target: str) -> RemoteConfig | None:
    if not target:
        return None
    secret = read_key(config.kv_store_key_file) if config.kv_store_key_file else b""
    paths = config.kv_store_tls.split(",") if config.kv_store_tls else [None] * 3
    return RemoteConfig(target=target, secret=secret, tls=read_tls(*paths))


def _check(cache: PrefixCache[Any]) -> LoadingCache[Any]:
    if not isinstance(cache, LoadingCache):
        raise ConfigError(
            f"--kv-offload wants a prefix cache that takes blocks in; {type(cache).__name__} has no load, unload, lend, settle"
        )
    return cache
