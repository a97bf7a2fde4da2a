import asyncio

import pytest

from octavo_core.testing.engine import ENGINE_CHECKS, ToyEngine
from octavo_core.wire import ModelCard

CARD = ModelCard(name="toy", root="", max_model_len=512, vocab_size=97, eos_token_ids=(0,))


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("max_running", [1, 64])
def test_the_toy_engine_conforms(check, max_running: int) -> None:
    asyncio.run(check(ToyEngine(CARD, max_running=max_running, delay_s=0.0005), list(range(1, 40))))


def test_a_broken_engine_is_noticed() -> None:
    class Forgetful(ToyEngine):
        async def abort(self, request_id: str) -> None:
            """Does nothing."""

    check = next(check for check in ENGINE_CHECKS if check.__name__ == "check_abort_ends_the_stream")
    with pytest.raises(AssertionError, match="the stream ended with"):
        asyncio.run(check(Forgetful(CARD), [1, 2, 3]))
