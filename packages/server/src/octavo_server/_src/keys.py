"""API keys: who may call, for which tenant, with what priority and how much. Touches the disk once, at the start.

A key is 256 random bits (`octavo key`), so one SHA-256 of it is all that is kept: there is nothing to guess from. A digest is compared
with every known one in constant time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from octavo_core.errors import ConfigError

LOWEST, HIGHEST = -1000, 1000
_PREFIX: Final = "ok-"


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a keys file.

    Attributes:
        name: What logs call it.
        sha256: Digest of the key, in hex.
        tenant: Whose cached prefixes it shares; keys of one tenant share them, others never do. Default: the key's own.
        priority: Lowest and highest priority a request may ask for; what it asks is clamped. Lower is served first.
        quota: Index into `--prefix-cache-quotas`.
        max_concurrent_requests: Requests it may have running or waiting at once; 0: no bound.
        max_tokens_per_minute: Prompt and generated tokens; a minute's worth may come at once. 0: no bound.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    tenant: str = ""
    priority: tuple[int, int] = (LOWEST, HIGHEST)
    quota: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_concurrent_requests: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_tokens_per_minute: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def own_tenant(self) -> str:
        """The tenant; a key without one is its own."""
        return self.tenant or self.sha256[:32]

    def clamp(self, priority: int) -> int:
        """The priority a request gets that asks for this one."""
        return max(self.priority[0], min(self.priority[1], priority))


class _KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeyEntry]


@dataclasses.dataclass(frozen=True)
class Keys:
    """Every key of a server."""

    entries: tuple[KeyEntry, ...]

    @classmethod
    def load(cls, given: Sequence[str], path: str) -> Keys:
        """Keys given in plain text and those of a file.

        Raises:
            ConfigError: The file cannot be read, or contradicts itself.
        """
        plain = [KeyEntry(name=f"--api-key {i}", sha256=digest_of(key)) for i, key in enumerate(given, 1)]
        entries = [*plain, *(_read(path) if path else [])]
        if path and not entries:
            raise ConfigError(f"--api-keys-file {path} has no key, and nobody could call: add one (octavo key), or leave it out")
        if len({entry.sha256 for entry in entries}) != len(entries):
            raise ConfigError("an API key is given twice: every key once")
        shares: dict[str, int] = {}
        for entry in entries:
            if shares.setdefault(entry.own_tenant, entry.quota) != entry.quota:
                raise ConfigError(f"keys of tenant '{entry.own_tenant}' have different quotas; a tenant has one")
        return cls(tuple(entries))

    def __bool__(self) -> bool:
        return bool(self.entries)

    def find(self, key: str) -> tuple[int, KeyEntry] | None:
        """The entry of a key and its index. Takes as long for a wrong key as for a right one."""
        digest, found = digest_of(key), None
        for index, entry in enumerate(self.entries):
            if hmac.compare_digest(digest, entry.sha256):
                found = (index, entry)
        return found


def digest_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key(name: str, tenant: str) -> tuple[str, bytes]:
    """A fresh key and its entry for a keys file."""
    key = _PREFIX + secrets.token_urlsafe(32)
    entry = {"name": name, "sha256": digest_of(key)} | ({"tenant": tenant} if tenant else {})
    return key, msgspec.json.format(msgspec.json.encode(entry), indent=2)


def _read(path: str) -> list[KeyEntry]:
    try:
        entries = msgspec.json.decode(Path(path).read_bytes(), type=_KeysFile).keys
    except OSError as error:
        raise ConfigError(f"--api-keys-file {path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--api-keys-file {path} is not what it should be: {error}") from None
    for entry in entries:
        low, high = entry.priority
        if not LOWEST <= low <= high <= HIGHEST:
            raise ConfigError(f"key '{entry.name}': priority is a pair from {LOWEST} to {HIGHEST}, lowest first, got {[low, high]}")
    return entries
