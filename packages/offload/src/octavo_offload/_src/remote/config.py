"""What a remote tier is told, and what it keeps of each block on its way. Values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from octavo_core.tiers import Answer
from octavo_offload._src.remote.tls import Tls


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    """Which store, and how.

    Attributes:
        target: Host and port.
        secret: The key shared with it; may be empty with `tls`.
        tls: Certificate, its key, and the certificates that sign the store's: PEM.
        tls_name: What the store's certificate is expected to name, where that is not the host.
        window_bytes: Host memory for blocks on their way, in either direction.
        deadline_s: Of every call.
        join_s: How long `open` waits to be joined; a store that does not answer is tried again later.
    """

    target: str
    secret: bytes = b""
    tls: Tls | None = None
    tls_name: str = ""
    window_bytes: int = 32 << 20
    deadline_s: float = 5.0
    join_s: float = 5.0


@dataclasses.dataclass
class Job:
    """A block on its way. `view` is read from where `seal` is given, else filled."""

    key: bytes
    view: memoryview
    seal: int | None
    done: Callable[[Answer, int], None]
    started_s: float
    slot: int = -1
    is_answered: bool = False
