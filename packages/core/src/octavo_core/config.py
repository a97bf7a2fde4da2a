"""Configuration as frozen dataclasses that describe themselves.

Every package has one frozen dataclass whose fields are made by `option`: default, help text, group and choices stand once,
beside the field, and serve the constructor, the command line and the documentation alike. Knows argparse; knows no option.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from octavo_core.errors import ConfigError, nearest_name

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: Sequence[str] | None = None,
    aliases: Sequence[str] = (),
    metavar: str | None = None,
) -> Any:
    """A dataclass field with what a command line needs to offer it.

    Args:
        default: Value when the option is not given. Immutable.
        help: One sentence, without a full stop.
        group: Heading under which `--help` lists it.
        choices: The only legal values, where they are few.
        aliases: Other flag spellings, e.g. `"--tp"`.
        metavar: Placeholder shown in `--help`.
    """
    meta = {"help": help, "group": group, "choices": choices, "aliases": tuple(aliases), "metavar": metavar}
    return dataclasses.field(default=default, metadata=meta)


def flag_name(field_name: str) -> str:
    """`max_num_seqs` → `--max-num-seqs`."""
    return "--" + field_name.replace("_", "-")


def parse_bool(text: str) -> bool:
    """`true/false`, `1/0`, `yes/no`, `on/off` in any case.

    Raises:
        argparse.ArgumentTypeError: For anything else.
    """
    word = text.strip().lower()
    if word in {"true", "1", "yes", "on"}:
        return True
    if word in {"false", "0", "no", "off"}:
        return False
    raise argparse.ArgumentTypeError(f"wanted true or false, got '{text}'")


def parse_int(text: str) -> int:
    """An integer, with the suffixes k, m, g (powers of 1000) and K, M, G, Ki, Mi, Gi (powers of 1024), as in `32K`.

    Raises:
        argparse.ArgumentTypeError: For anything else.
    """
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    body = text.strip().removesuffix("B")
    for suffix in sorted(units, key=len, reverse=True):
        if body.endswith(suffix):
            try:
                return int(float(body.removesuffix(suffix)) * units[suffix])
            except (ValueError, OverflowError):
                break
    try:
        return int(body)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted an integer such as 2048 or 32K, got '{text}'") from None


def add_arguments(parser: argparse.ArgumentParser, config: type[Any], *, skip: Sequence[str] = ()) -> None:
    """Offer every field of a config dataclass on a command line, under the headings its options name.

    A boolean takes `--flag`, `--flag=true|false`, `--flag true|false` and `--no-flag`; no other word after it is its value, so
    `--flag MODEL` is a flag and a model. Options left out stay absent from the namespace
    (`argparse.SUPPRESS`), so that `from_namespace` can tell a choice from a default.
    """
    hints = typing.get_type_hints(config)
    groups = {g.title: g for g in parser._action_groups}
    for field in dataclasses.fields(config):
        if field.name in skip or "help" not in field.metadata:
            continue
        meta = field.metadata
        group = groups.get(meta["group"]) or groups.setdefault(meta["group"], parser.add_argument_group(meta["group"]))
        _add_one(group, field, hints[field.name])
    parser.parse_known_args = functools.partial(_parse_known_args, parser)  # type: ignore[method-assign,assignment]


def _parse_known_args(
    parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """argparse hands an optional value whatever word comes next; here only a word that is a truth value."""
    flags = {name for action in parser._actions if action.type is parse_bool for name in action.option_strings}
    words: list[str] = []
    given = list(sys.argv[1:] if args is None else args)
    for word in given:
        if words and words[-1] in flags:
            if _is_bool(word):
                words[-1] += f"={word}"
                continue
            words[-1] += "=true"
        words.append(word)
    return argparse.ArgumentParser.parse_known_args(parser, words, namespace)


def _is_bool(text: str) -> bool:
    try:
        parse_bool(text)
    except argparse.ArgumentTypeError:
        return False
    return True


def _add_one(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    kind = _plain_type(hint)
    meta = field.metadata
    shown = "" if field.default in (None, "", ()) else f" (default: {field.default})"
    text = f"{meta['help']}{shown}".replace("%", "%%")
    names = [flag_name(field.name), *meta["aliases"]]
    common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        group.add_argument(*names, nargs="?", const=True, type=parse_bool, metavar="true|false", **common)
        group.add_argument(
            "--no-" + flag_name(field.name)[2:],
            dest=field.name,
            action="store_const",
            const=False,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        return
    common["metavar"] = meta["metavar"]
    if typing.get_origin(kind) is tuple:
        common["action"] = "append"
        kind = typing.get_args(kind)[0]
    group.add_argument(*names, type=parse_int if kind is int else kind, choices=meta["choices"], **common)


def _plain_type(hint: Any) -> Any:
    """`int | None` → `int`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def from_mapping(config: type[T], values: Mapping[str, Any]) -> T:
    """Build a config from a mapping.

    Raises:
        ConfigError: For a key the config does not have; the message names the nearest one it has.
    """
    names = {f.name for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise ConfigError(f"{config.__name__} has no option '{key}'{nearest_name(key, names)}")
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return config(**lists)


def from_namespace(config: type[T], namespace: argparse.Namespace) -> T:
    """Build a config from the options a parser of `add_arguments` saw; other names in the namespace are left alone."""
    names = {f.name for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    return from_mapping(config, {k: v for k, v in vars(namespace).items() if k in names})
