"""`AsyncEngine` keeps the promises of the Engine seam, and dies loudly."""

import asyncio

import pytest

from octavo_core.errors import EngineDeadError
from octavo_core.testing.engine import ENGINE_CHECKS
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.wire import EngineRequest, SamplingParams
from octavo_engine import AsyncEngine, EngineConfig

pytestmark = pytest.mark.slow

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def config(checkpoint):
    return EngineConfig(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        block_size=16,
        num_gpu_blocks_override=200,
        max_num_seqs=32,
        max_num_batched_tokens=64,
    )


@pytest.fixture(scope="module")
def engine(config):
    started = AsyncEngine.start(config)
    yield started
    started.close()
    assert not started.stats().is_ready


def request(name, **fields):
    return EngineRequest(request_id=name, prompt_ids=[5, 6, 7], sampling=LONG, **fields)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda c: c.__name__)
def test_the_seam_is_kept(engine, check):
    asyncio.run(asyncio.wait_for(check(engine, [5, 6, 7, 8]), PATIENCE_S))


def test_many_streams_at_once_each_get_their_own_tokens(engine):
    async def one(i):
        outputs = [o async for o in engine.generate(EngineRequest(request_id=f"m{i}", prompt_ids=[i + 1] * 4, sampling=LONG))]
        return [t for o in outputs for t in o.token_ids]

    async def crowd():
        return await asyncio.gather(*(one(i % 8) if i < 8 else one(i) for i in range(40)))

    answers = asyncio.run(crowd())
    assert all(len(a) == 200 for a in answers)


def test_cancelling_the_reader_aborts(engine):
    async def cancel():
        async def read():
            async for _ in engine.generate(request("cancelled")):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.stats().num_running or engine.stats().kv_usage:
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(cancel(), PATIENCE_S))


def test_a_failing_step_ends_every_stream_with_an_error_and_refuses_new_ones(config, monkeypatch):
    engine = AsyncEngine.start(config)

    async def fail():
        stream = engine.generate(request("doomed"))
        await anext(stream)
        monkeypatch.setattr(engine._core, "turn", lambda: 1 / 0)
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            [output async for output in stream]

    asyncio.run(asyncio.wait_for(fail(), PATIENCE_S))
    stats = engine.stats()
    assert not stats.is_ready
    assert "step loop ended" in stats.error
    with pytest.raises(EngineDeadError):
        asyncio.run(anext(engine.generate(request("late"))))
    engine.close()


def test_closing_ends_running_streams_with_an_error(config):
    engine = AsyncEngine.start(config)

    async def close():
        stream = engine.generate(request("cut"))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineDeadError, match="shutting down"):
            [o async for o in stream]

    asyncio.run(asyncio.wait_for(close(), PATIENCE_S))
