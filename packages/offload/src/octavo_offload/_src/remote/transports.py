"""The ways of reading a store's memory one-sidedly, by their names, the best first. A store has one of them; what a member has it says at `Join`."""

from __future__ import annotations

from typing import Final

from octavo_offload._src.remote import mooncake, ucx
from octavo_offload._src.remote.onesided import Reader
from octavo_offload._src.remote.shared import SharedSlab

GRPC: Final = "grpc"
"""Blocks that are asked for in the control plane: needs nothing, is always there."""
ONE_SIDED: Final = {ucx.TRANSPORT: ucx, mooncake.TRANSPORT: mooncake}


def installed(*, encrypted: bool) -> list[str]:
    """What a member of this machine can read with, the best first; one-sided reads are not encrypted."""
    return [*(name for name, way in ONE_SIDED.items() if not encrypted and way.is_here()), GRPC]


def reader(name: str, slab: SharedSlab) -> Reader:
    """A member's side of a one-sided way.

    Raises:
        OSError: It does not work here.
    """
    return ONE_SIDED[name].Reader(slab)
