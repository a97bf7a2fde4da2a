"""Checkpoints with reference results, served by the engine as it ships: paged, chunked, batched, cached.

A folder holds a checkpoint and `reference.npz`: `input_ids` and `lengths`, `logits` at every position, `greedy` continuations and their
`greedy_margin`. Compared are log-probabilities of the whole vocabulary at every prompt position, and greedy tokens up to the first margin
below `MARGIN`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

MARGIN: Final = 1e-3
TOLERANCE: Final = 5e-4


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

    reference = dict(np.load(folder / "reference.npz"))
    lengths = reference["lengths"]
    prompts = [ids[:n].tolist() for ids, n in zip(reference["input_ids"], lengths, strict=True)]
    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "max_logprobs": -1, "max_num_seqs": 8}
    llm = LLM(str(folder), **{**defaults, **options})
    try:
        greedy = llm.default_sampling(temperature=0.0, max_tokens=reference["greedy"].shape[1], ignore_eos=True)
        runs = [llm.generate(prompts, greedy) for _ in range(2)]
        scored = llm.generate(prompts, llm.default_sampling(max_tokens=1, prompt_logprobs=llm.card.vocab_size))
    finally:
        llm.close()
    told = wrong = 0
    for run in runs:
        for completion, wanted, margin in zip(run, reference["greedy"], reference["greedy_margin"], strict=True):
            small = np.flatnonzero(margin < MARGIN)
            upto = int(small[0]) if small.size else len(wanted)
            told += upto
            wrong += int(np.sum(np.asarray(completion.token_ids[:upto]) != wanted[:upto]))
    worst = max(
        _difference(completion.prompt_logprobs or [], logits[: n - 1])
        for completion, logits, n in zip(scored, reference["logits"], lengths, strict=True)
    )
    return Difference(folder.name, worst, told, wrong, sum(c.num_cached_tokens for c in runs[1]))


def _difference(scores: Sequence[Any], logits: np.ndarray) -> float:
    """Greatest difference over all positions and tokens; `scores` begin with the first token's, which has none."""
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    wanted = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    worst = 0.0
    for entry, row in zip(scores[1:], wanted, strict=True):
        got = np.full(row.shape, np.nan)
        got[np.asarray(entry.top_ids)] = entry.top_logprobs
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
    args = parser.parse_args(argv)
    more = {"tensor_parallel_size": args.tensor_parallel_size} if args.tensor_parallel_size > 1 else {}
    more |= {"expert_parallel": True} if args.expert_parallel else {}
    failed = 0
    for folder in args.folders:
        for block_size in args.block_size:
            options = {"block_size": block_size, "max_num_batched_tokens": args.chunk, **more}
            found = compare(folder, num_gpu_blocks_override=max(64, 2048 // block_size), **options)
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
