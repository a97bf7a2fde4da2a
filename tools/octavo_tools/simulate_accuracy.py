"""How well a simulation predicts a run it was not fitted to.

Serves one workload to fit the cost model and another, with other lengths and another rate, to predict; both with the default model and
random prompts. `record` serves one workload and keeps its logs, `compare` fits to the logs of one folder and predicts the others; without
either everything is done, the second workload three times. Exit status 1: a median is off by more than a fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo_core.records import RequestRecord, StepRecord, read_log
from octavo_core.wire import EngineRequest, SamplingParams
from octavo_engine import AsyncEngine, EngineConfig
from octavo_scheduler import SchedulerConfig
from octavo_scheduler import simulate as sim

ALLOWED = 0.2
"""Most that a median of the prediction may be off."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests at random times with random lengths.

    Attributes:
        requests: So many.
        rate: Arrivals a second.
        prompt, output: Least and most tokens.
    """

    requests: int
    rate: float
    prompt: tuple[int, int]
    output: tuple[int, int]


WORKLOADS = {
    "fit": Workload(24, 0.8, (16, 384), (8, 48)),
    "other": Workload(16, 0.5, (128, 640), (16, 32)),
}


async def serve(engine: AsyncEngine, workload: Workload, seed: int) -> None:
    """Send a workload and read every answer."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / workload.rate, workload.requests)

    async def one(number: int, prompt: list[int], output_len: int) -> None:
        sampling = SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0.0)
        request = EngineRequest(request_id=str(number), prompt_ids=prompt, sampling=sampling, arrival_s=time.monotonic())
        async for _ in engine.generate(request):
            pass

    running = []
    for number, gap in enumerate(gaps.tolist()):
        await asyncio.sleep(gap)
        prompt = rng.integers(100, engine.card.vocab_size, rng.integers(*workload.prompt, endpoint=True)).tolist()
        running.append(asyncio.create_task(one(number, prompt, int(rng.integers(*workload.output, endpoint=True)))))
    await asyncio.gather(*running)


def record(folder: Path, workload: Workload, seed: int) -> None:
    """Serve a workload; its logs and the engine's sizes are kept in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("steps.jsonl", "requests.jsonl"):
        (folder / name).unlink(missing_ok=True)
    config = EngineConfig(
        step_log=str(folder / "steps.jsonl"), request_log=str(folder / "requests.jsonl"), kv_cache_memory_bytes=2**28
    )
    engine = AsyncEngine.start(config)
    try:
        planner = engine._built.core.planner
        settings = {
            "scheduler": dataclasses.asdict(planner.scheduler.config),  # type: ignore[attr-defined]
            "blocks": planner.spec.num_blocks[0],
            "block_size": planner.spec.block_size,
            "waiting": planner.spec.max_sequences - planner.max_rows,
        }
        (folder / "engine.json").write_text(json.dumps(settings))
        asyncio.run(serve(engine, workload, seed))
    finally:
        engine.close()


def setup_of(folder: Path) -> sim.Setup:
    """The engine that a folder's logs come from."""
    settings = json.loads((folder / "engine.json").read_text())
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.pop("scheduler").items()
    }
    return sim.Setup(config=SchedulerConfig(**fields), **settings)


def predict(folder: Path, cost: sim.CostModel) -> dict[str, tuple[float, float]]:
    """Medians of TTFT and TPOT, measured and predicted, in seconds."""
    outcome = sim.simulate(sim.read_trace(folder / "requests.jsonl"), setup_of(folder), cost)
    requests = list(read_log(folder / "requests.jsonl", RequestRecord))
    ttft_s = [r.ttft_s for r in requests if r.ttft_s is not None]
    return {
        "ttft": (float(np.median(ttft_s)), float(np.median(outcome.ttft_s))),
        "tpot": (float(np.median(sim.recorded_tpot_s(requests))), float(np.median(outcome.tpot_s))),
    }


def compare(fitted: Path, others: Sequence[Path]) -> bool:
    """Print what was measured and predicted of each folder; whether the medians of all are close enough."""
    fit = sim.fit(read_log(fitted / "steps.jsonl", StepRecord))
    print(f"fitted to {fitted.name}: {fit.num_steps} steps, {fit.num_left_out} left out, median error {fit.median_error:.1%}")
    found = [predict(folder, fit.model) for folder in others]
    for folder, medians in zip(others, found, strict=True):
        print(
            f"{folder.name}: "
            + ", ".join(f"{name} measured {a * 1e3:.0f} ms, predicted {b * 1e3:.0f} ms" for name, (a, b) in medians.items())
        )
    close = True
    for name in ("ttft", "tpot"):
        error = float(np.median([b / a - 1 for a, b in (medians[name] for medians in found)]))
        close &= abs(error) <= ALLOWED
        print(f"median {name} off by {error:+.1%} (median of {len(found)}), allowed {ALLOWED:.0%}")
    return close


def main(argv: Sequence[str] | None = None) -> int:
    """Record and compare."""
    parser = argparse.ArgumentParser(prog="tools/simulate-accuracy", description=__doc__)
    parser.add_argument("words", nargs="*", help="FOLDER; or record WORKLOAD SEED FOLDER; or compare FITTED OTHER…")
    words: list[Any] = parser.parse_args(argv).words or ["simulate-accuracy"]
    if words[0] == "record":
        _, workload, seed, folder = words
        record(Path(folder), WORKLOADS[workload], int(seed))
        return 0
    if words[0] == "compare":
        return 0 if compare(Path(words[1]), [Path(word) for word in words[2:]]) else 1
    folder = Path(words[0])
    record(folder / "fit", WORKLOADS["fit"], 0)
    others = [folder / f"other{seed}" for seed in (1, 2, 3)]
    for seed, other in enumerate(others, 1):
        record(other, WORKLOADS["other"], seed)
    return 0 if compare(folder / "fit", others) else 1
