"""The sub-commands this package brings: `serve` and `chat`. Imports little, so that `octavo --help` is quick."""

from __future__ import annotations

import argparse


class Serve:
    """`octavo serve`."""

    help = "serve a model over an OpenAI-compatible HTTP API"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Offer the server's and the engine's options."""
        from octavo_server._src.serve_command import add_arguments

        add_arguments(parser)

    def run(self, namespace: argparse.Namespace) -> int:
        """Serve until told to stop."""
        from octavo_server._src.serve_command import run

        return run(namespace)


class Chat:
    """`octavo chat`."""

    help = "talk to a server from the terminal"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Offer the client's options."""
        from octavo_server._src.chat_command import add_arguments

        add_arguments(parser)

    def run(self, namespace: argparse.Namespace) -> int:
        """Ask one question, or talk line by line."""
        from octavo_server._src.chat_command import run

        return run(namespace)


serve = Serve()
chat = Chat()
