"""The HTTP endpoints as ASGI applications: read, validate, do, answer. What they do is in the modules they call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from octavo_core.errors import EngineDeadError, RequestError, UnknownModelError
from octavo_server._src.answers import Call, Job, answer
from octavo_server._src.body import parse_json, read_body, validate
from octavo_server._src.disconnect import until_disconnect
from octavo_server._src.fields import Generation
from octavo_server._src.openai_errors import DrainingError, NotReadyError, error_response
from octavo_server._src.prompts import check_ids
from octavo_server._src.requests import DetokenizeRequest, TokenizeMessages, TokenizePrompt
from octavo_server._src.state import Served, ServerState

_BIG_BODY = 256 * 1024
Prepare = Callable[[ServerState, Served, Any], Awaitable[Job]]


class Generate:
    """An endpoint that generates. Work on a request ends when its client goes away.

    Args:
        model: The request's pydantic model.
        prepare: Validates it against the served model.
    """

    def __init__(self, state: ServerState, model: type[Generation], prepare: Prepare) -> None:
        self._state, self._model, self._prepare = state, model, prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        call = Call.of(scope)
        served = self._state.require_served()
        with self._state.answering_for(call.key), self._state.bodies.of_one_request() as take:
            request = await self._read(receive, take)
            await until_disconnect(receive, self._work(served, call, request, scope, receive, send))

    async def _read(self, receive: Receive, take: Callable[[int], None]) -> Generation:
        """The validated request; a large one is looked at beside the event loop."""
        config = self._state.config
        body = await read_body(receive, config.max_body_bytes, config.body_timeout, take)

        def understand() -> Generation:
            return validate(self._model, parse_json(body), ignore_unknown=config.ignore_unknown_fields)

        return await self._state.off_loop(len(body), understand) if len(body) > _BIG_BODY else understand()

    async def _work(self, served: Served, call: Call, request: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        job = await self._prepare(self._state, served, request)
        await answer(self._state, served, call, job, scope, receive, send)


class JsonEndpoint:
    """An endpoint whose answer is one JSON object made from one JSON object, beside the event loop.

    Args:
        model: The request's pydantic model, or which one it is for this object.
        work: Makes the answer.
    """

    def __init__(
        self,
        state: ServerState,
        model: Callable[[dict[str, Any]], type[BaseModel]],
        work: Callable[[Served, Any], dict[str, Any]],
    ) -> None:
        self._state, self._model, self._work = state, model, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        served, config = self._state.require_served(), self._state.config
        with self._state.bodies.of_one_request() as take:
            body = await read_body(receive, config.max_body_bytes, config.body_timeout, take)
            answer = await self._state.off_loop(len(body), self._answer, served, body)
        await Response(answer, media_type="application/json")(scope, receive, send)

    def _answer(self, served: Served, body: bytes) -> bytes:
        value = parse_json(body)
        request: Any = validate(self._model(value), value, ignore_unknown=self._state.config.ignore_unknown_fields)
        served.check_model(request.model)
        return msgspec.json.encode(self._work(served, request))


def tokenize_kind(value: dict[str, Any]) -> type[BaseModel]:
    """Of the two requests of `/tokenize`."""
    return TokenizePrompt if value.get("messages") is None else TokenizeMessages


def tokenize(served: Served, request: TokenizePrompt | TokenizeMessages) -> dict[str, Any]:
    """Token ids of a prompt, or of messages through the chat template."""
    text = served.require_text()
    if isinstance(request, TokenizeMessages):
        given: str | None = text.render(
            [message.for_template() for message in request.messages],
            add_generation_prompt=request.add_generation_prompt,
            continue_final=request.continue_final_message,
            extra=request.chat_template_kwargs,
        )
    else:
        given = request.prompt if request.prompt is not None else request.content
    if given is None:
        raise RequestError("wanted 'prompt', 'content' or 'messages', got none of them", param="prompt")
    ids = text.encode(given, add_special_tokens=request.add_special_tokens)
    names = {"token_strs": [text.tokenizer.vocab_entry(one) for one in ids]} if request.return_token_strs else {}
    return {"tokens": ids, "count": len(ids), "max_model_len": served.card.max_model_len, **names}


def detokenize(served: Served, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    text = served.require_text()
    if request.tokens:
        check_ids(request.tokens, served.card, param="tokens")
    return {"prompt": text.tokenizer.decode(request.tokens, skip_special_tokens=False)}


class Information:
    """Endpoints that only tell something.

    Args:
        version: What `/version` answers.
        openapi: What `/openapi.json` answers.
    """

    def __init__(self, state: ServerState, version: str, openapi: bytes) -> None:
        self._state, self._version, self._openapi = state, version, openapi

    async def health(self, request: Request) -> Response:
        """Liveness: 200 only while a token can be made. A full queue and a shutdown are no reasons to end a process."""
        error = self._ailment()
        return JSONResponse({"status": "ok"}) if error is None else error_response(error)

    async def ready(self, request: Request) -> Response:
        """Readiness: 200 only while new requests are taken."""
        error = DrainingError("this server is shutting down") if self._state.is_draining else self._ailment()
        return JSONResponse({"status": "ready"}) if error is None else error_response(error)

    def _ailment(self) -> Exception | None:
        if self._state.served is None:
            return NotReadyError("the model is still loading")
        stats = self._state.served.engine.stats()
        if stats.error is not None:
            return EngineDeadError(f"the engine has stopped: {stats.error}")
        if stats.last_step_age_s > self._state.config.stuck_after:
            return EngineDeadError(f"the engine has not come round for {stats.last_step_age_s:.0f} s")
        return None if stats.is_ready else NotReadyError("the engine is not ready")

    async def version(self, request: Request) -> Response:
        """The server's version."""
        return JSONResponse({"version": self._version})

    async def openapi(self, request: Request) -> Response:
        """The API's description."""
        return Response(self._openapi, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        return Response(self._state.metrics.render(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Every name of the served model."""
        served = self._state.require_served()
        return JSONResponse({"object": "list", "data": [_model_card(served, name) for name in served.names]})

    async def model(self, request: Request) -> Response:
        """One name of the served model; the id may hold slashes."""
        served = self._state.require_served()
        name = request.path_params["model"]
        if name not in served.names:
            raise UnknownModelError(
                f"the model '{name[:200]}' does not exist; served here: {', '.join(served.names)}", param="model"
            )
        return JSONResponse(_model_card(served, name))


def _model_card(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "octavo",
        "root": served.card.name,
        "parent": None,
        "max_model_len": served.card.max_model_len,
        "permission": [],
    }
