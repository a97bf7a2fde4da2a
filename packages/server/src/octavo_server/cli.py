"""The `octavo` command. Sub-commands come from the entry-point group `octavo.commands`; this module knows none by name.

An entry point names an object with `help: str`, `add_arguments(parser)` and `run(namespace) -> int`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn, Protocol, runtime_checkable

from octavo_core.errors import OctavoError, nearest_name
from octavo_server._src.version import VERSION

GROUP = "octavo.commands"
_INTERRUPTED = 130


@runtime_checkable
class Command(Protocol):
    """What an entry point of `octavo.commands` resolves to."""

    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Offer this command's options."""

    def run(self, namespace: argparse.Namespace) -> int:
        """Do it; the exit status."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest option to an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.HelpFormatter, **kwargs})

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit over arguments nobody takes."""
        name = unknown[0].split("=", 1)[0]
        hint = nearest_name(name, self._option_string_actions) if name.startswith("-") else ""
        what = "option" if name.startswith("-") else "argument"
        self.error(f"unknown {what} '{name}'{hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    words = _with_dashes(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in words or os.environ.get("OCTAVO_DEBUG", "") not in ("", "0")
    try:
        return _run([word for word in words if word != "--debug"])
    except OctavoError as error:
        if is_debug:
            raise
        print(f"octavo: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    commands = {one.name: one for one in entry_points(group=GROUP)}
    chosen = words[0] if words and not words[0].startswith("-") else None
    if chosen is None:
        return _overview(words, commands)
    if chosen not in commands:
        print(f"octavo: unknown command '{chosen}'{nearest_name(chosen, commands)}; see octavo --help", file=sys.stderr)
        return 2
    command: Command = commands[chosen].load()
    parser = _Parser(prog=f"octavo {chosen}", description=command.help)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.add_arguments(parser)
    namespace, unknown = parser.parse_known_args(words[1:])
    if unknown:
        parser.refuse(unknown)
    return command.run(namespace)


def _overview(words: list[str], commands: dict[str, EntryPoint]) -> int:
    """`octavo`, `octavo --help` and `octavo --version`."""
    parser = _Parser(prog="octavo", description="Serve large language models with JAX.")
    parser.add_argument("--version", action="version", version=f"octavo {VERSION}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in sorted(commands):
        subparsers.add_parser(name, help=_help_of(commands[name]))
    _, unknown = parser.parse_known_args(words)
    if unknown:
        parser.refuse(unknown)
    parser.print_help()
    return 0 if words else 2


def _help_of(entry: EntryPoint) -> str:
    try:
        return str(entry.load().help)
    except Exception as error:  # one broken package must not hide the others
        return f"not available: {type(error).__name__}: {error}".replace("%", "%%")


def _with_dashes(words: Sequence[str]) -> list[str]:
    """vLLM takes `--max_model_len` for `--max-model-len`; so does Octavo. Values are left alone."""
    result = []
    for word in words:
        name, equals, value = word.partition("=")
        result.append(name.replace("_", "-") + equals + value if name.startswith("--") else word)
    return result


if __name__ == "__main__":
    sys.exit(main())
