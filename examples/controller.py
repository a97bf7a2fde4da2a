"""A serving controller with dynamic chunked prefill, on `AsyncLLM` alone.

Prompts are computed in chunks beside the streams that decode, and the more streams decode the smaller the chunks: 2048 tokens, 1024 above 32
streams, 512 above 64. The engine applies the rule in every step, to the streams that really decode then (`chunk_policy="adaptive"`). The
controller keeps the count of its own requests, so that it can say beforehand what a prompt will meet.

    python examples/controller.py --model HuggingFaceTB/SmolLM2-135M-Instruct "Explain paged attention in under 100 words."
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from octavo_engine import AsyncLLM, EngineConfig, SamplingParams

logger = logging.getLogger("octavo.controller")


@dataclass(frozen=True)
class ServingConfig:
    """What is served and how prompts are cut.

    Attributes:
        chunk_steps: (above so many streams, tokens of a chunk), as the engine's adaptive policy has it; the last that applies counts.
        engine: More options of `EngineConfig`.
    """

    model_name: str | None = None
    tensor_parallel_size: int = 1
    max_num_batched_tokens: int = 2048
    block_size: int = 32
    gpu_memory_utilization: float = 0.90
    chunk_steps: tuple[tuple[int, int], ...] = ((-1, 2048), (32, 1024), (64, 512))
    engine: dict[str, Any] = field(default_factory=dict)


class DynamicChunkedServingController:
    """Streams text and follows how many streams there are. Its methods are called from one event loop."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        self._llm: AsyncLLM | None = None
        self._num_active = 0

    async def initialize_engine(self) -> None:
        """Start the engine, without holding up the event loop."""
        config = self.config
        engine_config = EngineConfig(
            model=config.model_name,
            tensor_parallel_size=config.tensor_parallel_size,
            block_size=config.block_size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunk_policy="adaptive",
            **config.engine,
        )
        self._llm = await asyncio.to_thread(AsyncLLM.from_config, engine_config)
        logger.info("the engine serves %s", self._llm.card.name)

    @property
    def num_active(self) -> int:
        """Streams that run."""
        return self._num_active

    def compute_adaptive_chunk_size(self) -> int:
        """The chunk a prompt is cut into beside the streams that run now."""
        chunk = self.config.max_num_batched_tokens
        for above, tokens in self.config.chunk_steps:
            if self._num_active > above:
                chunk = min(tokens, self.config.max_num_batched_tokens)
        return chunk

    async def generate_stream(self, request_id: str, prompt: str | list[int], sampling: SamplingParams) -> AsyncIterator[str]:
        """The text of an answer as it comes. A reader that goes away, or whose task is cancelled, ends the request in the engine."""
        if self._llm is None:
            raise RuntimeError("the engine is not there yet; call initialize_engine first")
        logger.debug("%s: %d streams, chunks of %d", request_id, self._num_active, self.compute_adaptive_chunk_size())
        self._num_active += 1
        try:
            async for output in self._llm.generate(prompt, sampling, request_id):
                if output.new_text:
                    yield output.new_text
        except asyncio.CancelledError:
            logger.warning("%s: the client went away, the request is aborted", request_id)
            raise
        finally:
            self._num_active -= 1

    async def shutdown(self) -> None:
        """Stop the engine."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.close)


async def main(arguments: argparse.Namespace) -> None:
    """Stream one answer."""
    controller = DynamicChunkedServingController(ServingConfig(arguments.model))
    await controller.initialize_engine()
    try:
        sampling = SamplingParams(temperature=0.7, max_tokens=arguments.max_tokens)
        async for text in controller.generate_stream("request-1", arguments.prompt, sampling):
            print(text, end="", flush=True)
        print()
    finally:
        await controller.shutdown()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [%(levelname)s] %(name)s: %(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Explain paged attention in under 100 words.")
    parser.add_argument("--model", default=None, help="folder, .gguf file or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--max-tokens", type=int, default=150)
    asyncio.run(main(parser.parse_args()))
