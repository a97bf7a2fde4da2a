"""The real core in a process of its own keeps the promises of the Engine seam, over both transports."""

import asyncio

import pytest

from octavo_core.testing.engine import ENGINE_CHECKS
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.wire import EngineRequest, SamplingParams
from octavo_engine.config import EngineConfig
from octavo_engine.process import ProcessConfig, RemoteEngine, Supervisor

pytestmark = pytest.mark.slow


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


@pytest.fixture(scope="module", params=["iceoryx2", "sockets"])
def supervisor(request, config, tmp_path_factory):
    process = ProcessConfig(
        ipc=request.param, flight_recorder_dir=str(tmp_path_factory.mktemp("flight")), watchdog_timeout=PATIENCE_S
    )
    with Supervisor(config, process) as made:
        made.wait_ready(PATIENCE_S)
        yield made


def over(supervisor, body):
    async def go():
        engine = await RemoteEngine.start(supervisor.folder, supervisor.ipc)
        await engine.ready()
        try:
            return await body(engine)
        finally:
            await engine.aclose()

    return asyncio.run(asyncio.wait_for(go(), PATIENCE_S))


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda c: c.__name__)
def test_the_seam_is_kept(supervisor, check) -> None:
    over(supervisor, lambda engine: check(engine, [5, 6, 7, 8]))


def test_greedy_tokens_and_scores_are_those_of_the_engine_in_one_process(supervisor, llm) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    prompts = [[i + 1, i + 2, i + 3] for i in range(6)]

    async def body(engine):
        requests = [EngineRequest(request_id=f"r{i}", prompt_ids=ids, sampling=sampling) for i, ids in enumerate(prompts)]
        streams = engine.submit(requests)
        return [[output async for output in stream] for stream in streams]

    for outputs, done in zip(over(supervisor, body), llm.generate(prompts, sampling), strict=True):
        assert [token for output in outputs for token in output.token_ids] == done.token_ids
        scores = [entry for output in outputs for entry in output.logprobs]
        assert [entry.top_ids for entry in scores] == [entry.top_ids for entry in done.logprobs]
        assert [entry.logprob for entry in scores] == pytest.approx([entry.logprob for entry in done.logprobs], abs=1e-5)
        assert outputs[0].queue_s >= 0
