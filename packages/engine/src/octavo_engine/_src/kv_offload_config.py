"""What `--kv-offload` and `--cpu-offload-gb` say. Imports no jax and opens nothing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Final, Literal

from octavo_core.errors import ConfigError

FLAG: Final = "--kv-offload"
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Tiers below the device; none where both are absent.

    Attributes:
        host_bytes: Of host memory; 0: no tier there.
        host_policy: Which of its blocks goes first, `lru` or `arc`.
        disk: Folder and byte budget.
        disk_way: How it is reached: `auto`, the best that works, or `gds_mt`, GPUDirect Storage.
        remote: Host and port of a KV store.
    """

    host_bytes: int = 0
    disk: tuple[Path, int] | None = None
    remote: str = ""
    host_policy: Literal["lru", "arc"] = "lru"
    disk_way: Literal["auto", "gds_mt"] = "auto"

    @property
    def is_wanted(self) -> bool:
        """Any tier at all."""
        return self.host_bytes > 0 or self.disk is not None or bool(self.remote)


def parse(text: str | None, cpu_offload_gb: float = 0.0) -> Tiers:
    """Read both flags; `--cpu-offload-gb` is the host tier's short form.

    Raises:
        ConfigError: One says something that cannot be; the message names the flag.
    """
    if not 0 <= cpu_offload_gb < 1 << 20:
        raise ConfigError(f"--cpu-offload-gb is a size in GiB of at least 0, got {cpu_offload_gb:g}")
    host_bytes, disk, remote = int(cpu_offload_gb * 2**30), None, ""
    policy: Literal["lru", "arc"] = "lru"
    way: Literal["auto", "gds_mt"] = "auto"
    seen: set[str] = set()
    for part in filter(None, (text or "").split(",")):
        name, _, value = part.strip().partition("=")
        if name in seen:
            raise ConfigError(f"{FLAG} names {name} twice: '{text}'")
        seen.add(name)
        if name == "host":
            if host_bytes:
                raise ConfigError(f"{FLAG} host= and --cpu-offload-gb both say how large the host tier is; give one of them")
            host_bytes, policy = _host(value, part)
        elif name == "disk":
            disk, way = _disk(value, part)
        elif name == "remote":
            remote = _remote(value, part)
        else:
            raise ConfigError(
                f"{FLAG} knows host=SIZE[:lru|:arc], disk=PATH:SIZE[:gds_mt] and remote=HOST:PORT, such as host=4GiB,disk=/nvme/kv:50GiB; got '{part}'"
            )
    return Tiers(host_bytes, disk, remote, policy, way)


def _host(value: str, part: str) -> tuple[int, Literal["lru", "arc"]]:
    size, _, policy = value.partition(":")
    if policy not in ("", "lru", "arc"):
        raise ConfigError(f"{FLAG} host= takes :lru or :arc after the size, such as host=4GiB:arc; got '{part}'")
    return _size(size, part), "arc" if policy == "arc" else "lru"


def _remote(value: str, part: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{FLAG} remote= is host and port of an octavo kv-store such as remote=10.0.0.5:7100, got '{part}'")
    return value


def check_store(tiers: Tiers, key_file: str | None, tls: str | None) -> None:
    """Whether a KV store can be told from another.

    Raises:
        ConfigError: It cannot, or there is none to tell.
    """
    if tiers.remote and not key_file and not tls:
        raise ConfigError(
            f"{FLAG} remote= wants --kv-store-key-file or --kv-store-tls: store and engine prove to each other who they are"
        )
    if not tiers.remote and (key_file or tls):
        raise ConfigError(f"--kv-store-key-file and --kv-store-tls belong to {FLAG} remote=HOST:PORT, which is missing")
    if tls and len(tls.split(",")) != 3:
        raise ConfigError(f"--kv-store-tls is three files CERT,KEY,CA, got '{tls}'")


def _disk(value: str, part: str) -> tuple[tuple[Path, int], Literal["auto", "gds_mt"]]:
    rest = value.removesuffix(":gds_mt")
    path, colon, size = rest.rpartition(":")
    if not colon or not path:
        raise ConfigError(f"{FLAG} disk= is a folder and a size such as disk=/nvme/kv:50GiB, got '{part}'")
    return (Path(path).expanduser(), _size(size, part)), "auto" if rest == value else "gds_mt"


def _size(text: str, part: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size <= 0:
        raise ConfigError(f"{FLAG} wants a size above 0 such as 4GiB or 512M, got '{part}'")
    return size
