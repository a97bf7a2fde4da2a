"""Mutual TLS between a store and its members, from files. Touches the disk."""

from __future__ import annotations

from typing import NamedTuple

from octavo_core.errors import ConfigError


class Tls(NamedTuple):
    """Certificate, its key, and the certificates that sign those of the other side: PEM."""

    certificate: bytes
    key: bytes
    authorities: bytes


def read_tls(certificate: str | None, key: str | None, authorities: str | None) -> Tls | None:
    """Certificates from files; None where none are named.

    Raises:
        ConfigError: Some are missing or cannot be read.
    """
    paths = certificate, key, authorities
    if not any(paths):
        return None
    if not all(paths):
        raise ConfigError(
            "TLS of a KV store wants certificate, key and authorities, all three: either side is asked for its certificate"
        )
    try:
        contents = []
        for path in paths:
            with open(str(path), "rb") as file:
                contents.append(file.read())
    except OSError as error:
        raise ConfigError(f"certificates of the KV store cannot be read: {error}") from None
    return Tls(*contents)
