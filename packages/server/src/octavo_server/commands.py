"""The sub-commands this package brings: `serve`, `chat`, `key` and `completion`. Imports little, so that `octavo --help` is quick."""

from __future__ import annotations

import argparse
import sys


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


class Key:
    """`octavo key`."""

    help = "make an API key and its entry for --api-keys-file"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Takes a name."""
        parser.add_argument("name", help="what logs call the key")
        parser.add_argument("--tenant", default="", help="keys of one tenant share cached prefixes (default: the key's own)")

    def run(self, namespace: argparse.Namespace) -> int:
        """Print the entry, and the key once: it cannot be had from the entry."""
        from octavo_server._src.keys import new_key

        key, entry = new_key(namespace.name, namespace.tenant)
        print(f"key, shown only now: {key}", file=sys.stderr)
        print(entry.decode())
        return 0


class Completion:
    """`octavo completion`."""

    help = "print a script that completes octavo's words in a shell"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Takes a shell's name."""
        from octavo_server._src.completion_command import add_arguments

        add_arguments(parser)

    def run(self, namespace: argparse.Namespace) -> int:
        """Print the script."""
        from octavo_server._src.completion_command import run

        return run(namespace)


serve = Serve()
chat = Chat()
key = Key()
completion = Completion()
