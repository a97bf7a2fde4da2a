"""`LLM`: the engine as a plain object, for scripts and notebooks. Runs the step loop in the caller's thread."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from octavo_core.config import from_mapping
from octavo_core.errors import EngineDeadError, RequestError
from octavo_core.keys import namespace_of
from octavo_core.wire import EngineOutput, EngineRequest, FinishReason, SamplingParams, TokenLogprobs
from octavo_engine._src.compose import build
from octavo_engine.config import EngineConfig
from octavo_models.checkpoints import progress
from octavo_models.text import ChatTemplate, Detokenizer, StopStrings, Tokenizer, load_text

Prompt = str | Sequence[int]


@dataclasses.dataclass
class Completion:
    """What became of one prompt.

    Attributes:
        token_ids: Generated ids, the ending one included.
        text: Their text, cut before a stop string.
        finish_reason: `stop`, `length` or `error`.
        logprobs: One entry per generated token, when asked for.
        prompt_logprobs: One entry per prompt token, None for the first, when asked for.
        num_cached_tokens: Prompt tokens taken from the prefix cache.
    """

    prompt: Prompt
    prompt_ids: list[int]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


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
        text = None if config.skip_tokenizer_init else load_text(self.card.root)
        self.tokenizer: Tokenizer | None = text[0] if text else None
        self.chat_template: ChatTemplate | None = text[1] if text else None
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        use_progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts, as text or token ids, in one batch.

        Args:
            prompts: One or several.
            sampling: For all of them; the checkpoint's own defaults where None.
            stop: Strings that end the text.
            use_progress: Show a bar on standard error.

        Raises:
            RequestError: For a prompt or parameter that cannot be served; nothing has been run then.
            EngineDeadError: An earlier call was interrupted amid a step.
        """
        if self._error is not None:
            raise EngineDeadError(self._error)
        stop = [stop] if isinstance(stop, str) else stop
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: list[Any] = [prompts] if one else list(prompts)
        jobs = [self._job(p, sampling or self.default_sampling(), stop) for p in batch]
        self.core.check([job.request for job in jobs])
        for job in jobs:
            self.core.add(job.request)
        bar = progress("generating", len(jobs), unit="prompts") if use_progress else None
        if bar is None:
            self._run(jobs, lambda amount: None)
        else:
            with bar as advance:
                self._run(jobs, advance)
        return [job.completion for job in jobs]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation, or several at once. Options as in `generate`."""
        many: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        if self.tokenizer is None or self.chat_template is None:
            raise RequestError("a conversation needs a tokenizer; start without skip_tokenizer_init, or pass token ids to generate")
        prompts = [self.tokenizer.encode(self.chat_template.render(m), add_special_tokens=False) for m in many]
        return self.generate(prompts, sampling, **options)

    def default_sampling(self, **fields: Any) -> SamplingParams:
        """Sampling parameters with the checkpoint's own defaults, 16 tokens unless said otherwise."""
        return SamplingParams(**{"max_tokens": 16, **self.card.sampling_defaults, **fields})

    def _job(self, prompt: Prompt, sampling: SamplingParams, stop: Sequence[str]) -> _Job:
        if isinstance(prompt, str) and self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; start without skip_tokenizer_init, or pass token ids")
        ids = self.tokenizer.encode(prompt) if self.tokenizer is not None and isinstance(prompt, str) else [int(i) for i in prompt]
        request = EngineRequest(
            request_id=f"offline-{next(self._ids)}", prompt_ids=ids, sampling=sampling, namespace=namespace_of()
        )
        if self.tokenizer is None and stop:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids")
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer)
        return _Job(request, Completion(prompt, ids), detokenizer, StopStrings(list(stop)))

    def _run(self, jobs: list[_Job], advance: Any) -> None:
        by_id = {job.request.request_id: job for job in jobs}
        while self.core.has_work:
            for output in self._turn():
                job = by_id.get(output.request_id)
                if job is None:
                    continue
                if job.take(output):
                    self.core.abort(output.request_id)
                if job.completion.finish_reason is not None:
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


@dataclasses.dataclass
class _Job:
    request: EngineRequest
    completion: Completion
    detokenizer: Detokenizer | None
    stops: StopStrings

    def take(self, output: EngineOutput) -> bool:
        """Add an output; answers whether a stop string ended the text before the engine did."""
        done = self.completion
        done.token_ids += output.token_ids
        if output.logprobs is not None:
            done.logprobs = (done.logprobs or []) + output.logprobs
        if output.prompt_logprobs is not None:
            done.prompt_logprobs = output.prompt_logprobs
        done.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is FinishReason.ERROR:
            raise RequestError(output.error or "the engine failed")
        if self._add_text(output):
            done.finish_reason = "stop"
            return output.finish_reason is None
        done.finish_reason = None if output.finish_reason is None else str(output.finish_reason)
        return False

    def _add_text(self, output: EngineOutput) -> bool:
        """Answers whether a stop string was met."""
        if self.detokenizer is None:
            return False
        body = output.token_ids[: len(output.token_ids) - (output.stop_token_id is not None)]
        text, matched = self.stops.push(self.detokenizer.push(body))
        self.completion.text += text
        if output.finish_reason is not None and matched is None:
            text, matched = self.stops.push(self.detokenizer.finish())
            self.completion.text += text + ("" if matched is not None else self.stops.finish())
        return matched is not None
