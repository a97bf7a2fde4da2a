"""`AsyncLLM`: text in and text out of a running engine, for programs that live in asyncio.

A thin layer over `AsyncEngine`, which owns the step loop's thread and every promise about it: here are the tokenizer, stop strings and names.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from octavo_core.config import from_mapping
from octavo_core.errors import EngineDeadError
from octavo_core.wire import EngineStats, SamplingParams
from octavo_engine._src.async_engine import AsyncEngine
from octavo_engine._src.completion import Completion, Prompt
from octavo_engine._src.prompts import Message, Prompts, same
from octavo_engine.config import EngineConfig


class AsyncLLM:
    """An engine that streams. Make one with `from_config`.

    Example:
        ```python
        import asyncio
        from octavo_engine import AsyncLLM, SamplingParams

        async def main() -> None:
            async with AsyncLLM.from_config() as llm:
                async for out in llm.generate("The capital of France is", SamplingParams(max_tokens=8), "request-1"):
                    print(out.new_text, end="", flush=True)

        asyncio.run(main())
        ```

    Args:
        engine: Runs; closed by `close`.
        prompts: Of the same model.
    """

    def __init__(self, engine: AsyncEngine, prompts: Prompts) -> None:
        self._engine, self._prompts = engine, prompts
        self.card = engine.card
        self.tokenizer, self.chat_template = prompts.tokenizer, prompts.chat_template
        self.default_sampling = prompts.default_sampling

    @classmethod
    def from_config(cls, config: EngineConfig | None = None, **options: Any) -> AsyncLLM:
        """Load, compile and start. Blocks until it is ready: in a running event loop call it by `asyncio.to_thread`.

        Args:
            config: What to start; None: `options` say it.
            options: Fields of `EngineConfig`, instead of `config`.

        Raises:
            ConfigError: For an unknown or unusable option.
            CheckpointError: For a model that cannot be read.
        """
        chosen = from_mapping(EngineConfig, options) if config is None else from_mapping(EngineConfig, {**vars(config), **options})
        engine = AsyncEngine.start(chosen)
        try:
            return cls(engine, Prompts(engine.card, skip_tokenizer=chosen.skip_tokenizer_init))
        except BaseException:
            engine.close()
            raise

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        cache_salt: str = "",
        sampling_params: SamplingParams | None = None,
    ) -> AsyncGenerator[Completion, None]:
        """Everything that has come so far, each time there is more, until it has a finish reason.

        Cancelling the task that reads, or closing the iterator, aborts the request: its blocks are free again within a step.

        Args:
            prompt: Text or token ids.
            sampling: The checkpoint's own defaults where None.
            request_id: Unique among live requests; None: one is made up.
            stop: Strings that end the text.
            priority: Lower is served first, where `scheduling_policy` is `priority`.
            cache_salt: Prefixes are shared only among requests of the same salt.
            sampling_params: Another name of `sampling`.

        Raises:
            RequestError: The request cannot be served, or its id is in use.
            OverloadedError: The queue is full.
            EngineDeadError: The engine has failed or was closed; every stream that runs raises it.
        """
        name = f"request-{uuid.uuid4().hex}" if request_id is None else request_id
        chosen = same(sampling, sampling_params, ("sampling", "sampling_params"))
        job = self._prompts.job(prompt, chosen, stop, request_id=name, priority=priority, cache_salt=cache_salt)
        told: Completion | None = None
        async with aclosing(self._engine.submit([job.request])[0]) as outputs:
            async for output in outputs:
                job.take(output)
                told = job.news(told)
                yield told
                if told.finished:
                    return

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGenerator[Completion, None]:
        """`generate` for a conversation, through the checkpoint's chat template; `options` are `generate`'s."""
        prompt = self._prompts.render(messages, **(chat_template_kwargs or {}))
        async with aclosing(self.generate(prompt, sampling, request_id, **options)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with the finish reason `abort`. Unknown ids are ignored."""
        await self._engine.abort(request_id)

    def stats(self) -> EngineStats:
        """A reading of the step loop. Never blocks."""
        return self._engine.stats()

    async def check_health(self) -> None:
        """Nothing while the engine serves.

        Raises:
            EngineDeadError: It has failed or was closed.
        """
        stats = self.stats()
        if not stats.is_ready:
            raise EngineDeadError(stats.error or "the engine is shutting down")

    def startup_table(self) -> list[tuple[str, str, str]]:
        """What was chosen and why: (what, value, reason)."""
        return self._engine.startup_table()

    def close(self) -> None:
        """Stop the step loop; streams that still run end with an error."""
        self._engine.close()

    shutdown = close

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
