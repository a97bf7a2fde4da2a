"""`octavo models`: list, pull, inspect and convert checkpoints. Imports jax only to inspect and to convert."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo_models.checkpoints import DEFAULT_MODEL, cached_models, locate, open_checkpoint, packaged_checkpoint, resolve

if TYPE_CHECKING:
    from octavo_engine._src.inspect_model import Facts, Group

_UNITS: Final = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    listing = actions.add_parser("list", help="models on this machine: the default one and the hub's cache")
    pulling = actions.add_parser("pull", help="download a model, or only what is missing of it")
    looking = actions.add_parser("inspect", help="what a model is and what serving it takes; loads no weights")
    turning = actions.add_parser("convert", help="a .gguf file as a folder of safetensors with equal weights")
    for action in (pulling, looking):
        action.add_argument("model", nargs="?", metavar="MODEL", help="folder, .gguf file or hub id (default: the default model)")
        action.add_argument("--revision", help="branch, tag or commit on the hub")
    for action in (listing, pulling, looking):
        action.add_argument("--download-dir", metavar="FOLDER", help="where hub files are kept (default: the hub client's cache)")
    for action in (listing, looking):
        action.add_argument("--json", action="store_true", help="as JSON")
    looking.add_argument("--offline", action="store_true", help="only what is on this machine")
    looking.add_argument("--block-size", type=int, default=32, choices=(16, 32, 64), help="tokens in a KV block (default: 32)")
    turning.add_argument("model", metavar="FILE", help="the .gguf file; 'default' is the default model's")
    turning.add_argument("folder", metavar="FOLDER", type=Path, help="where the result goes: new, or empty")


def run(options: argparse.Namespace) -> int:
    """Do what was asked; the exit status."""
    action: Callable[[argparse.Namespace], int] = {"list": _list, "pull": _pull, "inspect": _inspect, "convert": _convert}[
        options.action
    ]
    return action(options)


def _list(options: argparse.Namespace) -> int:
    """The checkpoint in the installed package first: it is what `octavo serve` takes when no model is named."""
    rows = []
    packaged = packaged_checkpoint()
    if packaged is not None:
        opened = open_checkpoint(packaged)
        rows.append(
            (f"{DEFAULT_MODEL} (default)", "package", packaged.stat().st_size, opened.config.architecture, str(packaged), "")
        )
    for model in cached_models(options.download_dir):
        rows.append((model.name, model.revision, model.num_bytes, model.architecture, str(model.path), model.problem or ""))
    if options.json:
        names = ("name", "revision", "bytes", "architecture", "path", "problem")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return 0
    if not rows:
        print("no models here; get one with octavo models pull OWNER/NAME")
    shown = [(name, revision, size_of(size), problem or architecture) for name, revision, size, architecture, _, problem in rows]
    print("\n".join(columns([("MODEL", "REVISION", "SIZE", "ARCHITECTURE"), *shown] if shown else [])), end="\n" if shown else "")
    return 0


def _pull(options: argparse.Namespace) -> int:
    """Download, read what came, say where it is."""
    path, name = locate(options.model, revision=options.revision, download_dir=options.download_dir)
    checkpoint = open_checkpoint(path, name=name)
    size = sum(file.stat().st_size for file in checkpoint.weight_files)
    print(f"{name}: {checkpoint.config.architecture}, {size_of(size)} of weights, at {path}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from octavo_engine._src.inspect_model import inspect

    facts = inspect(
        options.model,
        revision=options.revision,
        download_dir=options.download_dir,
        offline=options.offline,
        block_size=options.block_size,
    )
    if options.json:
        print(json.dumps(_plain(dataclasses.asdict(facts)), indent=2))
    else:
        print("\n".join(columns(list(_rows(facts)))))
    return 0


def _convert(options: argparse.Namespace) -> int:
    from octavo_models.convert import convert

    done = convert(resolve(None if options.model == "default" else options.model, offline=True), options.folder)
    size = sum(file.stat().st_size for file in done.weight_files)
    print(
        f"{done.path}: {done.config.architecture}, {size_of(size)} of {done.config.dtype} weights in {len(done.weight_files)} files"
    )
    return 0


def _rows(facts: Facts) -> Iterable[tuple[str, str]]:
    """What people read, in order."""
    config = facts.config
    yield "model", facts.name
    yield "at", facts.path
    yield "architecture", f"{facts.architecture}, {config.num_layers} layers, {config.num_heads} heads of {config.head_dim}"
    yield "context", f"{config.max_position_embeddings} tokens"
    yield "text", facts.text
    active = "" if facts.active == facts.parameters else f", {count_of(facts.active)} of them for a token"
    yield "parameters", count_of(facts.parameters) + active
    for kind in facts.stored:
        yield "stored", f"{kind.name}: {kind.num_tensors} tensors, {size_of(kind.num_bytes)}"
    for group in facts.groups:
        yield "KV", _group(group, facts.kv_dtype)
    for what, backends in (("attention", facts.attention), ("layers", facts.layers)):
        for name, verdict in backends.items():
            yield what, f"{name}: {verdict}"
    yield "weights here", f"{facts.weights}, {size_of(facts.weight_bytes)}"
    fits = "fits" if facts.needed_bytes <= facts.free_bytes else "does NOT fit"
    yield "needs", f"{size_of(facts.needed_bytes)} with one sequence of full length; {size_of(facts.free_bytes)} are free: {fits}"


def _group(group: Group, dtype: str) -> str:
    window = f", window of {group.window}" if group.window else ""
    shape = f"{group.layers} layers, {group.kv_heads} heads of {group.head_dim}{window}"
    return f"{group.kind}: {shape}: {group.token_bytes} bytes a token in {dtype}, {size_of(group.sequence_bytes)} at full length"


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows with their columns lined up; the last is as long as it is."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows]


def size_of(num_bytes: int) -> str:
    """`93.8 MiB`."""
    for shift, unit in _UNITS:
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.1f} {unit}"
    return f"{num_bytes} bytes"


def count_of(number: int) -> str:
    """`134.5 million`."""
    return f"{number / 1e9:.2f} billion" if number >= 10**9 else f"{number / 1e6:.1f} million"


def _plain(value: Any) -> Any:
    """Tuples with names as objects: a dataclass's `asdict` leaves them."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
