"""What can go wrong with a store. Imports nothing."""

from __future__ import annotations


class PeerError(Exception):
    """The store did not answer, or not as it should."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final
