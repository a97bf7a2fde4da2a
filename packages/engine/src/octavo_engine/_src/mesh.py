"""A model over several devices: who is in the mesh, and attention in which each device keeps the KV of its own heads.

Knows that KV and queries divide by heads. Knows no backend and no layout: every device has KV memory of its own, which a backend made as
if it were alone, so a kernel that no compiler could divide serves here as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32, UInt8

from octavo_core.errors import ConfigError
from octavo_core.seams import AttentionBackend, AttentionBatch
from octavo_core.specs import KVGroupSpec

AXIS: Final = "tensor"
_EVERYWHERE: Final = PartitionSpec()
_BY_DEVICE: Final = PartitionSpec(AXIS)
_BY_HEAD: Final = PartitionSpec(None, AXIS)


def device_mesh(size: int, nodes: int = 1) -> Mesh | None:
    """`size` devices, as many and the first of each of `nodes` processes; None for one, which needs no mesh.

    Raises:
        ConfigError: There are fewer.
    """
    if size == 1:
        return None
    devices = [d for node in range(nodes) for d in [d for d in jax.devices() if d.process_index == node][: size // nodes]]
    if size > len(devices):
        hint = (
            "; on a CPU XLA_FLAGS=--xla_force_host_platform_device_count=N makes some" if jax.devices()[0].platform == "cpu" else ""
        )
        where = f", {size // nodes} on each of {nodes} nodes" if nodes > 1 else ""
        raise ConfigError(f"--tensor-parallel-size {size} needs as many devices{where}, JAX sees {len(jax.devices())}{hint}")
    return Mesh(np.asarray(devices[:size]), (AXIS,))


def everywhere(mesh: Mesh) -> NamedSharding:
    """All of a value on each device."""
    return NamedSharding(mesh, _EVERYWHERE)


def put(tree: Any, mesh: Mesh) -> Any:
    """The same values on each device of a mesh, also of one that reaches into other processes; each has them already."""
    here = everywhere(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, here, np.asarray(x).__getitem__), tree)


def local_group(spec: KVGroupSpec, mesh: Mesh | None) -> KVGroupSpec:
    """What one device keeps of a KV group; of a latent, which all heads read, everything."""
    return spec if mesh is None else dataclasses.replace(spec, kv_heads=max(spec.kv_heads // mesh.size, 1))


class DividedAttention:
    """An `octavo_core.seams.AttentionBackend` over a mesh, around one for a single device.

    Every array of its KV is that of the inner backend with an axis of devices in front.

    Args:
        inner: Serves on each device the heads that are there.
        mesh: With the one axis `AXIS`.
    """

    def __init__(self, inner: AttentionBackend[Any], mesh: Mesh) -> None:
        self._inner, self._mesh = inner, mesh
        self.layout_id = f"{inner.layout_id}/{mesh.size}"

    def init_kv(self, spec: KVGroupSpec, num_blocks: int) -> Any:
        """Zeroed memory on each device."""

        def make() -> Any:
            alone = self._inner.init_kv(local_group(spec, self._mesh), num_blocks)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (self._mesh.size, *x.shape)), alone)

        return jax.jit(make, out_shardings=NamedSharding(self._mesh, _BY_DEVICE))()

    def write(
        self,
        kv: Any,
        layer: int,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> Any:
        """Each device stores the heads it keeps."""

        def local(kv: Any, k: Array, v: Array, slots: Array) -> Any:
            return _stacked(self._inner.write(_own(kv), layer, k, v, slots))

        by = _BY_HEAD if k.shape[1] % self._mesh.size == 0 else _EVERYWHERE
        return self._on_each(local, (_BY_DEVICE, by, by, _EVERYWHERE), _BY_DEVICE)(kv, k, v, slot_mapping)

    def attend(
        self,
        kv: Any,
        layer: int,
        q: Float[Array, "tokens q_heads head_dim"],
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float32[Array, " q_heads"] | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Each device attends with its own heads."""
        rules: dict[str, Any] = {name: x for name, x in (("window", window), ("softcap", softcap)) if x is not None}

        def local(kv: Any, q: Array, batch: AttentionBatch, *sinks: Array) -> Array:
            own: dict[str, Any] = {"sinks": sinks[0]} if sinks else {}
            return self._inner.attend(_own(kv), layer, q, batch, scale=scale, **rules, **own)

        extra = () if sinks is None else (sinks,)
        specs = (_BY_DEVICE, _BY_HEAD, _EVERYWHERE, *(_BY_DEVICE for _ in extra))
        out: Array = self._on_each(local, specs, _BY_HEAD)(kv, q, batch, *extra)
        return out

    def gather(self, kv: Any, block_ids: Int32[Array, " ids"]) -> UInt8[Array, "ids block_bytes"]:
        """A block's bytes on the first device, on the second, …"""
        out: Array = self._on_each(lambda kv, ids: self._inner.gather(_own(kv), ids), (_BY_DEVICE, _EVERYWHERE), _BY_HEAD)(
            kv, block_ids
        )
        return out

    def scatter(self, kv: Any, block_ids: Int32[Array, " ids"], data: UInt8[Array, "ids block_bytes"]) -> Any:
        """The inverse of `gather`; id −1 stores nothing."""

        def local(kv: Any, ids: Array, data: Array) -> Any:
            return _stacked(self._inner.scatter(_own(kv), ids, data))

        return self._on_each(local, (_BY_DEVICE, _EVERYWHERE, _BY_HEAD), _BY_DEVICE)(kv, block_ids, data)

    def _on_each(self, run: Callable[..., Any], inputs: tuple[PartitionSpec, ...], outputs: PartitionSpec) -> Callable[..., Any]:
        divided: Callable[..., Any] = jax.shard_map(run, mesh=self._mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return divided


def _own(kv: Any) -> Any:
    """What this device keeps, without the axis of devices."""
    return jax.tree.map(lambda x: x[0], kv)


def _stacked(kv: Any) -> Any:
    return jax.tree.map(lambda x: x[None], kv)
