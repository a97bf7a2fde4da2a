"""The engine's sub-commands of `octavo`: `generate` and `doctor`. Imports no jax until one runs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys

from octavo_core.config import add_arguments, from_namespace
from octavo_core.errors import OctavoError, RequestError
from octavo_engine.config import EngineConfig


class Generate:
    """`octavo generate`: complete prompts without a server."""

    help = "complete one prompt (or standard input) without a server"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Offer the engine's options and the sampling ones."""
        parser.add_argument("prompt", nargs="*", help="prompts; none: each line of standard input is one")
        group = parser.add_argument_group("sampling")
        group.add_argument("--max-tokens", type=int, default=64, help="most tokens to generate (default: 64)")
        group.add_argument("--temperature", type=float, default=None, help="0 is greedy (default: the checkpoint's)")
        group.add_argument("--top-p", type=float, default=None, help="smallest set of tokens with this much probability")
        group.add_argument("--stop", action="append", default=[], help="string that ends the text; repeatable")
        group.add_argument("--chat", action="store_true", help="treat each prompt as a user's message")
        add_arguments(parser, EngineConfig)

    def run(self, options: argparse.Namespace) -> int:
        """Print each completion on standard output."""
        from octavo_engine._src.offline import LLM

        prompts = options.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        if not prompts:
            raise RequestError("nothing to complete: give a prompt, or lines on standard input")
        config = from_namespace(EngineConfig, options)
        llm = LLM.from_config(config)
        given = {k: getattr(options, k) for k in ("temperature", "top_p") if getattr(options, k) is not None}
        sampling = llm.default_sampling(max_tokens=options.max_tokens, **given)
        if options.chat:
            chats = [[{"role": "user", "content": p}] for p in prompts]
            done = llm.chat(chats, sampling, stop=options.stop)
        else:
            done = llm.generate(prompts, sampling, stop=options.stop)
        for completion in done:
            print(completion.text)
        llm.close()
        return 0


class Doctor:
    """`octavo doctor`: what this machine has, and whether an engine would start."""

    help = "show what this machine has and whether the default model can be read"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Takes the model's options only."""
        parser.add_argument("--model", default=None, help="model to look at; without it the default one")

    def run(self, options: argparse.Namespace) -> int:
        """Print one line per fact; 1 when something needed is missing."""
        problems = 0
        for name, check in (("python", _python), ("packages", _packages), ("jax", _jax), ("memory", _memory), ("cache", _cache)):
            problems += _report(name, check)
        return min(1, problems + _report("model", lambda: _model(options.model)))


def _report(name: str, check: object) -> int:
    try:
        print(f"ok    {name:9s} {check()}")  # type: ignore[operator]
    except (OctavoError, ImportError, RuntimeError, OSError) as error:
        print(f"FAIL  {name:9s} {error}")
        return 1
    return 0


def _python() -> str:
    return f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"


def _packages() -> str:
    names = [d.metadata["Name"] for d in importlib.metadata.distributions() if (d.metadata["Name"] or "").startswith("octavo-")]
    return ", ".join(f"{n} {importlib.metadata.version(n)}" for n in sorted(set(names)) if n != "octavo-workspace")


def _jax() -> str:
    import jax

    devices = ", ".join(f"{d.device_kind} ({d.platform})" for d in jax.devices())
    return f"{jax.__version__}: {devices}"


def _memory() -> str:
    from octavo_engine._src.compose import free_bytes

    return f"{free_bytes() / 2**30:.1f} GiB free for weights and KV"


def _cache() -> str:
    from octavo_engine._src.compose import compiled_programs_folder

    folder = compiled_programs_folder(None)
    if folder is None:
        return "compiled programs are not kept"
    free = shutil.disk_usage(folder if folder.exists() else folder.absolute().anchor).free
    return f"compiled programs are kept in {folder}, {free / 2**30:.0f} GiB free"


def _model(name: str | None) -> str:
    from octavo_models.checkpoints import resolve

    checkpoint = resolve(name, offline=name is None)
    return f"{checkpoint.name}: {checkpoint.config.architecture}, {checkpoint.config.num_layers} layers, at {checkpoint.path}"


generate = Generate()
doctor = Doctor()
