"""The sub-command this package brings: `octavo kv-store`. Imports little, so that `octavo --help` is quick."""

from __future__ import annotations

import argparse


class KvStore:
    """`octavo kv-store`: a node that keeps KV blocks for several engines."""

    help = "keep KV blocks in memory for engines on other machines"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Where, how much, and for whom."""
        parser.add_argument("--bind", required=True, metavar="HOST:PORT", help="address to listen at; there is no default")
        parser.add_argument("--memory", required=True, metavar="SIZE", help="host memory for blocks, such as 64GiB; taken at start")
        parser.add_argument("--key-file", metavar="FILE", help="the key that engines have too, in a file (openssl rand -hex 32)")
        parser.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM); with it members must have one too")
        parser.add_argument("--tls-key", metavar="FILE", help="key of the certificate (PEM)")
        parser.add_argument("--tls-ca", metavar="FILE", help="certificates that sign those of members (PEM)")
        parser.add_argument(
            "--transport",
            choices=("grpc", "ucx", "mooncake"),
            default="grpc",
            help="how blocks are read: ucx (NIXL) and mooncake (its transfer engine) let members read memory by themselves, over RDMA where there is some (see docs/rocev2.md); both sides want the library",
        )
        parser.add_argument("--member-window", default="64MiB", metavar="SIZE", help="bytes one engine may lease at a time")
        parser.add_argument(
            "--store-window", default=None, metavar="SIZE", help="bytes all together may; default: half of the memory"
        )

    def run(self, namespace: argparse.Namespace) -> int:
        """Serve until told to stop."""
        from octavo_offload._src.remote.serve import run

        return run(namespace)


kv_store = KvStore()
