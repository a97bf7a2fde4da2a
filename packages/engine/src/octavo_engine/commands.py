"""The engine's sub-commands of `octavo`: `generate`, `models`, `simulate` and `doctor`. Imports no jax until one is chosen."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys

from octavo_core.config import add_arguments, from_namespace, parse_int
from octavo_core.errors import ConfigError, OctavoError, RequestError
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


class Models:
    """`octavo models`: what is on this machine, and what could be."""

    help = "list, download, look into and convert models"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Offer one sub-command for each."""
        from octavo_engine._src.models_command import add_arguments

        add_arguments(parser)

    def run(self, options: argparse.Namespace) -> int:
        """Do what was asked."""
        from octavo_engine._src.models_command import run

        return run(options)


class Simulate:
    """`octavo simulate`: what settings would do to a trace, by the scheduler that serves."""

    help = "replay a trace through the scheduler, sweep settings, fit a cost model"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Offer what is replayed, the engine around it, and what is written."""
        from octavo_engine._src.simulate_command import DEFAULT_COST
        from octavo_scheduler import SchedulerConfig

        parser.usage = "octavo simulate TRACE | fit STEP-LOG | replay STEP-LOG --requests REQUEST-LOG | replay FLIGHT-RECORD | cluster TRACE  [options]"
        parser.add_argument(
            "what", nargs="+", help="a trace (Mooncake JSONL, Azure CSV, a request log); or fit, replay or cluster, and a file"
        )
        engine = parser.add_argument_group("the engine")
        cost = "a file of `simulate fit`, terms such as base=8e-3,decode=2e-5,prefill=4e-5, or roofline:parameters=8e9,flops=4e14"
        engine.add_argument("--cost", default=DEFAULT_COST, help=f"how long steps take: {cost} (default: {DEFAULT_COST})")
        engine.add_argument("--blocks", type=parse_int, default=16_384, help="KV blocks (default: 16384)")
        engine.add_argument("--block-size", type=int, default=32, help="tokens in a KV block (default: 32)")
        engine.add_argument(
            "--cache", choices=("radix", "counts"), help="the cache that serves, or only its counts (default: as the trace allows)"
        )
        engine.add_argument("--prefix-cache-policy", default="two-lifetimes", help="order of eviction (default: two-lifetimes)")
        engine.add_argument("--no-enable-prefix-caching", action="store_true", help="match no prefixes")
        engine.add_argument("--lag", type=int, default=1, help="steps whose results a plan does not know yet (default: 1)")
        engine.add_argument(
            "--max-num-queued-reqs", type=int, default=0, help="requests that may wait before new ones are refused; 0: no bound"
        )
        engine.add_argument(
            "--max-num-queued-tokens", type=parse_int, default=0, help="prompt tokens that may wait likewise; 0: no bound"
        )
        engine.add_argument("--deadline", type=float, default=0.0, help="seconds after its arrival when a first token is due (edf)")
        engine.add_argument("--deadline-per-token", type=float, default=0.0, help="and so much later for each prompt token")
        self._add_results(parser)
        add_arguments(parser, SchedulerConfig)

    def _add_results(self, parser: argparse.ArgumentParser) -> None:
        load = parser.add_argument_group("the load")
        load.add_argument("--load", type=float, default=1.0, help="arrivals come so many times as fast (default: 1)")
        load.add_argument("--limit", type=int, help="replay the first so many requests")
        load.add_argument(
            "--leave-out-longer", type=parse_int, default=0, metavar="TOKENS", help="leave out requests of more tokens"
        )
        load.add_argument("--requests", metavar="FILE", help="request log of the run whose step log is replayed")
        cluster = parser.add_argument_group("a cluster")
        cluster.add_argument("--replicas", type=int, default=2, help="engines (default: 2)")
        cluster.add_argument(
            "--decoders", type=int, default=0, help="engines that go on where the replicas have computed a prompt (default: 0)"
        )
        cluster.add_argument("--route", help="round-robin, least-loaded, prefix-hash, kv-aware; several by commas (default: all)")
        cluster.add_argument(
            "--tier", action="append", default=[], metavar="TOKENS:BYTES/S[:S][:shared]", help="where evicted KV goes; repeatable"
        )
        cluster.add_argument("--kv-bytes", type=float, default=131072.0, help="bytes of KV of a token (default: 131072)")
        cluster.add_argument("--link", type=float, default=25e9, help="bytes a second between replicas (default: 25e9)")
        out = parser.add_argument_group("what comes out")
        out.add_argument(
            "--sweep",
            metavar="NAME[=A:B],…",
            help="try every combination: chunk_policy,token_budget=512:2048,blocks,policy,load=1:2",
        )
        out.add_argument("--jobs", type=int, default=1, help="processes of a sweep (default: 1)")
        out.add_argument("--slo-ttft", type=float, default=2.0, metavar="S", help="TTFT of a good request, in seconds (default: 2)")
        out.add_argument(
            "--slo-tpot-ms", type=float, default=100.0, metavar="MS", help="TPOT of a good request, in ms (default: 100)"
        )
        for name, what in (
            ("csv", "a row for each setting"),
            ("json", "the same as JSON"),
            ("html", "one page with table and charts"),
        ):
            out.add_argument(f"--{name}", metavar="FILE", help=f"write {what}")
        out.add_argument("--png", metavar="FOLDER", help="write charts as PNG (needs octavo-scheduler[plots])")
        out.add_argument("--step-log", metavar="FILE", help="write the simulated steps as a server would have logged them")
        out.add_argument("--output", metavar="FILE", help="where fit writes the cost model (default: cost.json)")

    def run(self, options: argparse.Namespace) -> int:
        """Simulate, fit or replay."""
        from octavo_engine._src.simulate_command import run

        return run(options)


class Doctor:
    """`octavo doctor`: what this machine has, and whether an engine would start."""

    help = "show what this machine has and whether the default model can be read"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """What to look at."""
        parser.add_argument("--model", default=None, help="model to look at; without it the default one")
        parser.add_argument(
            "--fabric", action="store_true", help="look at RDMA links, limits and the transport of KV blocks instead"
        )
        parser.add_argument("--allow-tcp", action="store_true", help="with --fabric: blocks may travel over TCP")
        parser.add_argument("--prometheus", action="store_true", help="with --fabric: print congestion counters for a monitor")

    def run(self, options: argparse.Namespace) -> int:
        """Print one line per fact; 1 when something needed is missing."""
        if options.fabric or options.allow_tcp or options.prometheus:
            return _fabric(options)
        problems = 0
        for name, check in (
            ("python", _python),
            ("packages", _packages),
            ("jax", _jax),
            ("graphs", _graphs),
            ("memory", _memory),
            ("cache", _cache),
        ):
            problems += _report(name, check)
        missing = _report("model", lambda: _model(options.model))
        return min(1, problems + (missing or _report("attention", lambda: _attention(options.model))))


def _fabric(options: argparse.Namespace) -> int:
    """`octavo doctor --fabric`."""
    from octavo_offload import fabric

    if not options.fabric:
        raise ConfigError("--allow-tcp and --prometheus belong to octavo doctor --fabric, which is missing")
    if options.prometheus:
        print(fabric.exposition(), end="")
        return 0
    facts = fabric.report(allow_tcp=options.allow_tcp)
    for fact in facts:
        print(f"{'ok  ' if fact.is_good else 'FAIL'}  {fact.name:9s} {fact.told}")
    return int(not all(fact.is_good for fact in facts))


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


def _graphs() -> str:
    """XLA's command buffers."""
    import jax

    from octavo_engine._src.command_buffers import command_buffers

    return "command buffers {}: {}".format(*command_buffers(jax.devices()[0].platform, os.environ.get("XLA_FLAGS", "")))


def _memory() -> str:
    from octavo_engine._src.host import free_bytes

    return f"{free_bytes() / 2**30:.1f} GiB free for weights and KV"


def _cache() -> str:
    from octavo_engine._src.host import compiled_programs_folder

    folder = compiled_programs_folder(None)
    if folder is None:
        return "compiled programs are not kept"
    free = shutil.disk_usage(folder if folder.exists() else folder.absolute().anchor).free
    return f"compiled programs are kept in {folder}, {free / 2**30:.0f} GiB free"


def _model(name: str | None) -> str:
    from octavo_models.checkpoints import resolve

    checkpoint = resolve(name, offline=name is None)
    return f"{checkpoint.name}: {checkpoint.config.architecture}, {checkpoint.config.num_layers} layers, at {checkpoint.path}"


def _attention(name: str | None) -> str:
    """Which kernels would serve the model, and why not those asked before them."""
    from octavo_engine._src.inspect_model import SERVES, inspect

    told = inspect(name, offline=name is None).attention
    serving = next((backend for backend, answer in told.items() if answer == SERVES), None)
    before = [f"{backend}: {answer}" for backend, answer in told.items() if answer != SERVES]
    if serving is None:
        raise ConfigError(f"no backend serves this model ({'; '.join(before)})")
    passed = [f"{backend}: {told[backend]}" for backend in list(told)[: list(told).index(serving)]]
    return f"{serving} ({'; '.join(passed) or 'first in order that can serve'})"


generate = Generate()
models = Models()
simulate = Simulate()
doctor = Doctor()
