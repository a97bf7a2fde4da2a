"""Checkpoints with reference results, served by the engine as it ships: paged, chunked, batched, cached.

A folder holds a checkpoint and `reference.npz`: `input_ids` and `lengths`, `logits` at every position, `greedy` continuations and their
`greedy_margin`. Compared are log-probabilities of the whole vocabulary at every prompt position, and greedy tokens up to the first margin
below `MARGIN`. With `--serve` the same is asked of `octavo serve --skip-tokenizer-init`: prompts as ids, `echo` with every token's score as
`token_id:N`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from octavo_core.errors import OctavoError
from octavo_tools.nightly import server

MARGIN: Final = 1e-3
TOLERANCE: Final = 5e-4
ANSWER_S: Final = 600.0
DEFAULTS: Final = {"dtype": "float32", "skip_tokenizer_init": True, "max_logprobs": -1, "max_num_seqs": 8}


@dataclasses.dataclass(frozen=True)
class Difference:
    """What a checkpoint came out with.

    Attributes:
        logits: Greatest difference of a log-probability.
        told, wrong: Greedy tokens compared, and those that differ.
        cached: Tokens of the prompts that the second run found in the prefix cache.
    """

    name: str
    logits: float
    told: int
    wrong: int
    cached: int

    @property
    def ok(self) -> bool:
        """Within the tolerance everywhere."""
        return self.logits <= TOLERANCE and self.told > 0 and not self.wrong


def compare(folder: Path, **options: Any) -> Difference:
    """Serve a checkpoint with these options of `EngineConfig` and compare; greedy tokens twice, the second time from the prefix cache."""
    from octavo_engine import LLM

    reference, prompts = _reference(folder)
    llm = LLM(str(folder), **{**DEFAULTS, **options})
    try:
        greedy = llm.default_sampling(temperature=0.0, max_tokens=reference["greedy"].shape[1], ignore_eos=True)
        runs = [llm.generate(prompts, greedy) for _ in range(2)]
        scored = llm.generate(prompts, llm.default_sampling(max_tokens=1, prompt_logprobs=llm.card.vocab_size))
    finally:
        llm.close()
    entries = [[entry for entry in c.prompt_logprobs or [] if entry is not None] for c in scored]  # the first token has none
    scores = [[dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) for entry in each] for each in entries]
    told, wrong = _greedy([[c.token_ids for c in run] for run in runs], reference)
    return Difference(folder.name, _worst(scores, reference), told, wrong, sum(c.num_cached_tokens for c in runs[1]))


def compare_served(folder: Path, **options: Any) -> Difference:
    """As `compare`, through `octavo serve` and HTTP: one prompt after another, then all at once, which finds them in the cache."""
    reference, prompts = _reference(folder)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**DEFAULTS, **options}.items() if value is not True]
    flags += [f"--{name.replace('_', '-')}" for name, value in {**DEFAULTS, **options}.items() if value is True]
    num_new = reference["greedy"].shape[1]
    with server([str(folder), *flags, "--disable-access-log", "--watchdog-timeout=600"]) as url:
        body = {"temperature": 0, "ignore_eos": True, "max_tokens": num_new, "return_token_ids": True}
        scored = {**body, "echo": True, "logprobs": reference["logits"].shape[-1]}
        alone = [_post(url, {**scored, "prompt": prompt})["choices"][0] for prompt in prompts]
        again = _post(url, {**body, "prompt": prompts})
    scores = [[_by_id(top) for top in c["logprobs"]["top_logprobs"][1 : len(p)]] for c, p in zip(alone, prompts, strict=True)]
    runs = [[choice["token_ids"] for choice in choices] for choices in (alone, again["choices"])]
    told, wrong = _greedy(runs, reference)
    details = again["usage"].get("prompt_tokens_details") or {}
    return Difference(folder.name, _worst(scores, reference), told, wrong, details.get("cached_tokens") or 0)


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return json.load(answer)


def _by_id(top: dict[str, float]) -> dict[int, float]:
    return {int(name.removeprefix("token_id:")): score for name, score in top.items()}


def _reference(folder: Path) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """What transformers said, and the prompts it was asked."""
    reference = dict(np.load(folder / "reference.npz"))
    return reference, [ids[:n].tolist() for ids, n in zip(reference["input_ids"], reference["lengths"], strict=True)]


def _greedy(runs: Sequence[Sequence[Sequence[int]]], reference: dict[str, np.ndarray]) -> tuple[int, int]:
    """Greedy tokens compared, and those that differ; tokens of each prompt in each run."""
    told = wrong = 0
    for run in runs:
        for ids, wanted, margin in zip(run, reference["greedy"], reference["greedy_margin"], strict=True):
            small = np.flatnonzero(margin < MARGIN)
            upto = int(small[0]) if small.size else len(wanted)
            told += upto
            wrong += int(np.sum(np.asarray(ids[:upto]) != wanted[:upto]))
    return told, wrong


def _worst(scores: Sequence[Sequence[dict[int, float]]], reference: dict[str, np.ndarray]) -> float:
    """Greatest difference of a log-probability over all prompts, positions and tokens; infinite where one is missing."""
    worst = 0.0
    for each, logits, length in zip(scores, reference["logits"], reference["lengths"], strict=True):
        wide = logits[: length - 1].astype(np.float64)
        top = wide.max(-1, keepdims=True)
        wanted = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
        for entry, row in zip(each, wanted, strict=True):
            got = np.full(row.shape, np.nan)
            got[list(entry)] = list(entry.values())
            worst = max(worst, float(np.max(np.abs(got - row))) if not np.isnan(got).any() else float("inf"))
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    """Compare folders and print a line for each."""
    parser = argparse.ArgumentParser("models-parity", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--chunk", type=int, default=16, help="most new tokens in a step")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--serve", action="store_true", help="through a server of its own for each, over HTTP")
    args = parser.parse_args(argv)
    more = {"tensor_parallel_size": args.tensor_parallel_size} if args.tensor_parallel_size > 1 else {}
    more |= {"expert_parallel": True} if args.expert_parallel else {}
    failed = 0
    for folder in args.folders:
        for block_size in args.block_size:
            options = {"block_size": block_size, "max_num_batched_tokens": args.chunk, **more}
            options["num_gpu_blocks_override"] = max(64, 2048 // block_size)
            try:
                found = (compare_served if args.serve else compare)(folder, **options)
            except (OctavoError, RuntimeError) as error:
                print(f"{folder.name:14} block {block_size:2}  FAILED  {error}", flush=True)
                failed += 1
                continue
            verdict = "ok" if found.ok else "DIFFERS"
            print(
                f"{found.name:14} block {block_size:2}  logprobs within {found.logits:.1e}  greedy {found.told - found.wrong}/{found.told}"
                f"  cached {found.cached}  {verdict}",
                flush=True,
            )
            failed += not found.ok
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
