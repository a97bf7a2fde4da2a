"""`octavo completion`: a shell script with every command and option as they are now; TAB then starts no Python.

Loads all commands, which is why it runs when asked and not on every TAB.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Final

import shtab

from octavo_core.errors import ConfigError
from octavo_server.cli import GROUP, Command

SHELLS: Final = ("bash", "zsh", "fish")
_INSTALL: Final = {
    "bash": "octavo completion bash > ~/.local/share/bash-completion/completions/octavo",
    "zsh": 'octavo completion zsh > "${fpath[1]}/_octavo", with compinit in ~/.zshrc',
    "fish": "octavo completion fish > ~/.config/fish/completions/octavo.fish",
}
_FILES: Final = {"FILE", "FOLDER", "PATH"}
_MODELS: Final = {"model_or_path", "model"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes a shell's name."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="whose script")
    parser.epilog = "To install:\n" + "\n".join(f"  {shell}: {how}" for shell, how in _INSTALL.items())


def run(namespace: argparse.Namespace) -> int:
    """Print the script; the exit status."""
    print(script(namespace.shell))
    return 0


def script(shell: str) -> str:
    """The script for one of `SHELLS`.

    Raises:
        ConfigError: For another shell.
    """
    if shell not in SHELLS:
        raise ConfigError(f"completion is written for {', '.join(SHELLS)}, got '{shell}'")
    return shtab.complete(whole_parser(), shell)


def whole_parser() -> argparse.ArgumentParser:
    """Every command with its options, as one parser. A command that cannot be loaded is left out, as `octavo --help` shows it broken."""
    parser = argparse.ArgumentParser(prog="octavo", allow_abbrev=False)
    parser.add_argument("--version", action="version", version="", help="show the version")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for entry in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        with contextlib.suppress(Exception):
            command: Command = entry.load()
            command.add_arguments(argparse.ArgumentParser())  # one that cannot offer its options is not half there
            inner = subparsers.add_parser(entry.name, help=command.help, allow_abbrev=False)
            inner.add_argument("--debug", action="store_true", help="show the traceback of an error")
            command.add_arguments(inner)
    for action in _actions(parser):
        if action.metavar in _FILES or action.dest in _MODELS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every option and argument, those of sub-commands included."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from _actions(inner)
