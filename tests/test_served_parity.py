"""Every family through `octavo serve --skip-tokenizer-init`: prompts as ids, scores of the whole vocabulary by `token_id:N`, greedy tokens."""

from pathlib import Path

import pytest

from octavo_tools.models_parity import compare_served

FIXTURES = Path(__file__).parents[1] / "packages" / "models" / "tests" / "fixtures"
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "reference.npz").exists())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_server_of_token_ids_gives_the_scores_and_tokens_of_the_reference(name):
    block_size = 16 if FAMILIES.index(name) % 2 else 32
    found = compare_served(FIXTURES / name, block_size=block_size, max_num_batched_tokens=16, num_gpu_blocks_override=200)
    assert found.ok, found
    assert found.cached > 0
