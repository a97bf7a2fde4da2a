"""`AsyncLLM`: streams of text, cancelled, aborted, refused and failed; and the controller in `examples`, which is written on it."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from octavo_core.errors import ConfigError, EngineDeadError, RequestError
from octavo_core.testing.patience import PATIENCE_S
from octavo_engine import AsyncLLM, EngineConfig, SamplingParams

EXAMPLES = Path(__file__).parents[3] / "examples"
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def async_llm(with_tokenizer):
    started = AsyncLLM.from_config(
        model=str(with_tokenizer), block_size=16, num_gpu_blocks_override=200, max_num_seqs=32, max_num_batched_tokens=64
    )
    yield started
    started.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def collect(outputs):
    return [output async for output in outputs]


async def is_empty(async_llm):
    """Wait until nothing runs and no block is leased."""
    while (stats := async_llm.stats()).num_running or stats.num_waiting or stats.kv_usage:
        await asyncio.sleep(0.01)
    return True


def test_news_add_up_to_the_whole_answer(async_llm):
    seen = run(collect(async_llm.generate("abc", SHORT, "one")))
    last = seen[-1]
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    assert (last.request_id, last.finish_reason, len(last.token_ids)) == ("one", "length", 9)
    assert "".join(output.new_text for output in seen) == last.text
    assert [i for output in seen for i in output.new_token_ids] == last.token_ids
    assert last.outputs[0].text == last.text
    assert last.prompt_token_ids == async_llm.tokenizer.encode("abc")
    assert [len(output.token_ids) for output in seen] == sorted(len(output.token_ids) for output in seen)


def test_a_request_may_go_by_vllms_keywords_and_without_a_name(async_llm):
    by_name = run(collect(async_llm.generate(prompt=[5, 6, 7], sampling_params=SHORT)))[-1]
    assert by_name.token_ids == run(collect(async_llm.generate([5, 6, 7], SHORT, "two")))[-1].token_ids
    with pytest.raises(RequestError, match="sampling and sampling_params mean the same"):
        run(collect(async_llm.generate([5], SHORT, sampling_params=SHORT)))


def test_cancelling_the_task_aborts_and_frees_its_blocks(async_llm):
    async def cancel():
        started = asyncio.Event()

        async def read():
            async for _ in async_llm.generate([5, 6, 7], LONG, "cancelled"):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        generated = async_llm.stats().generation_tokens
        assert await is_empty(async_llm)
        return async_llm.stats().generation_tokens - generated

    assert run(cancel()) < 100  # of the 200 it would have had


def test_leaving_the_loop_early_aborts(async_llm):
    async def leave():
        generated = async_llm.stats().generation_tokens
        async for _ in async_llm.generate([5, 6, 7], LONG, "left"):
            break
        assert await is_empty(async_llm)
        return async_llm.stats().generation_tokens - generated

    assert run(leave()) < 100


def test_abort_ends_the_stream_and_says_so(async_llm):
    async def abort():
        stream = async_llm.generate([5, 6, 7], LONG, "aborted")
        await anext(stream)
        await async_llm.abort("aborted")
        last = (await collect(stream))[-1]
        await async_llm.abort("nobody")
        return last.finish_reason

    assert run(abort()) == "abort"


def test_an_id_in_use_is_refused_and_free_again_afterwards(async_llm):
    async def twice():
        first = async_llm.generate([5, 6, 7], LONG, "same")
        await anext(first)
        with pytest.raises(RequestError, match="request id 'same' is in use"):
            await anext(async_llm.generate([8, 9], SHORT, "same"))
        await first.aclose()
        return await collect(async_llm.generate([8, 9], SHORT, "same"))

    assert len(run(twice())[-1].token_ids) == 9


def test_a_stop_string_ends_text_and_request(async_llm):
    whole = run(collect(async_llm.generate("abc", LONG, "whole")))[-1].text
    stop = whole[20:22]
    seen = run(collect(async_llm.generate("abc", LONG, "stopped", stop=stop)))
    assert seen[-1].text == whole[: whole.index(stop)]
    assert seen[-1].finish_reason == "stop"
    assert run(is_empty(async_llm))


def test_a_conversation_goes_through_the_template(async_llm):
    messages = [{"role": "user", "content": "abc"}]
    last = run(collect(async_llm.chat(messages, SHORT, "chat")))[-1]
    assert last.prompt_ids == async_llm.tokenizer.encode("[user]abc[assistant]", add_special_tokens=False)
    with pytest.raises(RequestError, match="chat template refuses"):
        run(collect(async_llm.chat([{"role": "nobody", "content": "x"}], SHORT)))


@pytest.mark.parametrize(("prompt", "words"), [([], "at least one token"), ([10**6], "token ids are 0 to")])
def test_a_prompt_that_cannot_be_served_is_refused(async_llm, prompt, words):
    with pytest.raises(RequestError, match=words):
        run(collect(async_llm.generate(prompt, SHORT)))
    assert run(is_empty(async_llm))


def test_a_failed_engine_ends_every_stream_with_the_error(checkpoint, monkeypatch):
    config = EngineConfig(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        block_size=16,
        num_gpu_blocks_override=200,
        max_num_seqs=32,
        max_num_batched_tokens=64,
    )

    started = AsyncLLM.from_config(config)

    async def fail():
        async with started as llm:
            await llm.check_health()
            with pytest.raises(RequestError, match="needs a tokenizer"):
                await collect(llm.generate("text"))
            streams = [llm.generate([5, 6, 7 + i], LONG, f"s{i}") for i in range(3)]
            for stream in streams:
                await anext(stream)
            monkeypatch.setattr(llm._engine._core, "turn", lambda: 1 / 0)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                    await collect(stream)
            with pytest.raises(EngineDeadError):
                await anext(llm.generate([5], SHORT))
            with pytest.raises(EngineDeadError):
                await llm.check_health()

    run(fail())


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        AsyncLLM.from_config(max_num_seq=3)


@pytest.fixture(scope="module")
def controller_module():
    spec = importlib.util.spec_from_file_location("octavo_example_controller", EXAMPLES / "controller.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_controller_cuts_prompts_smaller_the_more_streams_decode(controller_module, with_tokenizer, tmp_path):
    """A long prompt alone, beside 40 streams and beside 70: what the steps really held is what the controller said."""
    module, log = controller_module, tmp_path / "steps.jsonl"
    options = {"max_num_seqs": 80, "num_gpu_blocks_override": 14_000, "step_log": str(log), "enable_prefix_caching": False}
    controller = module.DynamicChunkedServingController(module.ServingConfig(str(with_tokenizer), block_size=16, engine=options))
    told, cancelled = [], []

    async def read(name, prompt, tokens):
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return [text async for text in controller.generate_stream(name, prompt, sampling)]

    async def serve():
        await controller.initialize_engine()
        for crowd in (0, 40, 70):
            readers = [asyncio.create_task(read(f"{crowd}-{i}", [5 + i % 50, 7], 3000)) for i in range(crowd)]
            while controller._llm.stats().num_running < crowd or controller.num_active < crowd:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
            told.append(controller.compute_adaptive_chunk_size())
            await read(f"{crowd}-long", [9] * 2500, 2)
            for reader in readers:
                reader.cancel()
            cancelled.extend(await asyncio.gather(*readers, return_exceptions=True))
            assert await is_empty(controller._llm)
        await controller.shutdown()

    asyncio.run(asyncio.wait_for(serve(), PATIENCE_S))
    assert told == [2048, 1024, 512]
    assert len(cancelled) == 110
    assert all(isinstance(error, asyncio.CancelledError) for error in cancelled)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    largest = [
        max(s["prefill_tokens"] for s in steps if low <= s["num_decodes"] <= high) for low, high in ((0, 0), (33, 64), (65, 80))
    ]
    assert largest == told
