"""`LLM`: the engine as a plain object, for scripts and notebooks. Runs the step loop in the caller's thread."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from octavo_core.config import from_mapping
from octavo_core.errors import EngineDeadError
from octavo_core.wire import EngineOutput, SamplingParams
from octavo_engine._src.completion import Completion, Job, Prompt
from octavo_engine._src.compose import build
from octavo_engine._src.prompts import Message, Prompts, is_conversation, one_each, same
from octavo_engine.config import EngineConfig
from octavo_models.checkpoints import progress

__all__ = ["LLM", "Completion"]


class LLM:
    """An engine for offline use.

    Example:
        ```python
        from octavo_engine import LLM

        print(LLM().generate(["The capital of France is"])[0].text)
        ```

    Args:
        model: As `--model`.
        options: Any other field of `EngineConfig`.

    Raises:
        ConfigError: For an unknown or unusable option.
        CheckpointError: For a model that cannot be read.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._open(from_mapping(EngineConfig, {"model": model, **options}))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The same from a ready `EngineConfig`."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        # The bounds of a server's queue are not meant for a batch that is all there is.
        self._built = build(dataclasses.replace(config, max_num_queued_reqs=0, max_num_queued_tokens=0))
        self._error: str | None = None
        self.core = self._built.core
        self.card = self._built.card
        self._prompts = Prompts(self.card, skip_tokenizer=config.skip_tokenizer_init)
        self.tokenizer, self.chat_template = self._prompts.tokenizer, self._prompts.chat_template
        self.default_sampling = self._prompts.default_sampling
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        use_progress: bool | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[Completion]:
        """Complete prompts, as text or token ids, in one batch.

        Args:
            prompts: One or several.
            sampling: For all of them, or one for each; the checkpoint's own defaults where None.
            stop: Strings that end the text.
            use_progress: Show a bar on standard error.
            sampling_params, use_tqdm: Other names of `sampling` and `use_progress`.

        Raises:
            RequestError: For a prompt or parameter that cannot be served; nothing has been run then.
            EngineDeadError: An earlier call was interrupted amid a step.
        """
        if self._error is not None:
            raise EngineDeadError(self._error)
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: list[Any] = [prompts] if one else list(prompts)
        each = one_each(same(sampling, sampling_params, ("sampling", "sampling_params")), len(batch))
        jobs = [
            self._prompts.job(prompt, chosen, stop, request_id=f"offline-{next(self._ids)}")
            for prompt, chosen in zip(batch, each, strict=True)
        ]
        self.core.check([job.request for job in jobs])
        for job in jobs:
            self.core.add(job.request)
        shown = same(use_progress, use_tqdm, ("use_progress", "use_tqdm"))
        bar = progress("generating", len(jobs), unit="prompts") if shown else contextlib.nullcontext(lambda amount: None)
        with bar as advance:
            self._run(jobs, advance)
        return [job.news(None) for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation, or several at once.

        Args:
            messages: One conversation (each message with `role` and `content`), or a list of them.
            sampling: As in `generate`.
            add_generation_prompt, continue_final_message: As in `octavo_models.ChatTemplate.render`.
            chat_template_kwargs: Other names the template may use, such as `tools` or `enable_thinking`.
            options: As in `generate`.

        Raises:
            RequestError: There is no tokenizer or template, the template refuses, or as `generate`.
        """
        many: list[Any] = [messages] if is_conversation(messages) else list(messages)
        more = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        prompts = [self._prompts.render(conversation, **more, **(chat_template_kwargs or {})) for conversation in many]
        return self.generate(prompts, sampling, **options)

    def _run(self, jobs: list[Job], advance: Any) -> None:
        by_id = {job.request.request_id: job for job in jobs}
        while self.core.has_work:
            for output in self._turn():
                job = by_id.get(output.request_id)
                if job is None:
                    continue
                if job.take(output):
                    self.core.abort(output.request_id)
                if job.completion.finished:
                    del by_id[output.request_id]
                    advance(1)

    def _turn(self) -> list[EngineOutput]:
        """A turn that was interrupted leaves plan and device apart: what comes after it could be wrong, so nothing does."""
        try:
            return self.core.turn()
        except BaseException as error:
            self._error = f"a step was interrupted by {type(error).__name__}; make a new LLM"
            raise

    def close(self) -> None:
        """End the engine's logs."""
        self._built.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
