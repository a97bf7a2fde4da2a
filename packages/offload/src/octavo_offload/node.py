"""A store of blocks for engines on other machines, to be embedded; `octavo kv-store` runs one. Imports grpc."""

from octavo_offload._src.remote.blocks import Blocks
from octavo_offload._src.remote.node import Node

__all__ = ["Blocks", "Node"]
