"""`octavo kv-store`: from options to a running node. Touches files, signals and the network."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading

from octavo_core.errors import ConfigError
from octavo_offload._src.remote import mooncake, ucx
from octavo_offload._src.remote.auth import read_key
from octavo_offload._src.remote.blocks import Blocks
from octavo_offload._src.remote.node import Node
from octavo_offload._src.remote.tls import Tls, read_tls
from octavo_offload._src.sizes import parse_size


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: Something cannot be as the options say.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    host, colon, port = options.bind.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--bind is a host and a port such as 10.0.0.5:7100, got '{options.bind}'")
    secret = read_key(options.key_file) if options.key_file else b""
    memory = parse_size(options.memory, "--memory")
    window = parse_size(options.store_window, "--store-window") if options.store_window else None
    try:
        blocks = Blocks(memory, window_bytes=window, member_bytes=parse_size(options.member_window, "--member-window"), lock=True)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--memory {options.memory} cannot be had: {error}") from None
    tls = read_tls(options.tls_cert, options.tls_key, options.tls_ca)
    shared = readable(blocks, options.transport, tls, host)
    node = Node(options.bind, blocks, secret, tls=tls, readable=shared)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    node.start()
    print(
        f"KV store at {node.address}, {blocks.total_bytes / 2**20:.0f} MiB ({blocks.slab.told}), blocks by {shared.told if shared else 'grpc'}, "
        f"incarnation {node.incarnation.hex()}",
        flush=True,
    )
    stop.wait()
    node.stop()
    count = blocks.count
    print(
        f"KV store ends: {count.stored} blocks stored, {count.hits} leased, {count.evicted} evicted, {count.corrupt} corrupt",
        flush=True,
    )
    if shared is not None:  # such libraries were seen to fault at an interpreter's exit
        os._exit(0)
    return 0


def readable(blocks: Blocks, transport: str, tls: Tls | None, host: str) -> ucx.ReadableMemory | mooncake.ReadableMemory | None:
    """A store's memory as members may read it; None: they ask for blocks by gRPC.

    Raises:
        ConfigError: The library is not there or does not work, or what it sends would not be encrypted.
    """
    if transport == "grpc":
        return None
    if tls is not None:
        raise ConfigError(f"--transport {transport} sends blocks in clear text, which --tls-cert is against; leave one of them out")
    try:
        if transport == mooncake.TRANSPORT:
            return mooncake.ReadableMemory(blocks.slab.whole, host)
        return ucx.ReadableMemory(blocks.slab.whole, blocks.is_leased)
    except OSError as error:
        raise ConfigError(f"--transport {transport} does not work here: {error}; --transport grpc needs nothing") from None
