"""Octavo's shared vocabulary.

Floor 1 (no jax): `errors`, `config`, `keys`, `wire`, `frames`, `records`.
Floor 2 (needs the extra `jax`): `specs`, `plan`, `seams`, `native`, `testing`.
Importing this package imports floor 1 only.
"""

from octavo_core import config, errors, frames, keys, records, wire

__version__ = "0.1.0"

__all__ = ["config", "errors", "frames", "keys", "records", "wire"]
