"""The HTTP endpoints as ASGI applications: read, validate, do, answer. What they do is in the modules they call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from octavo_core.errors import EngineDeadError, RequestError, UnknownModelError
from octavo_server._src.answers import Call, Job, answer
from octavo_server._src.body import parse_json, read_body, validate
from octavo_server._src.disconnect import until_disconnect
from octavo_server._src.fields import Generation
from octavo_server._src.openai_errors import DrainingError, NotReadyError, error_response
from octavo_server._src.prompts import check_ids, off_loop
from octavo_server._src.requests import DetokenizeRequest, TokenizeMessages, TokenizePrompt
from octavo_server._src.state import Served, ServerState

_BIG_BODY = 256 * 1024
Prepare = Callable[[ServerState, Served, Any], Awaitable[Job]]


async def read_request(state: ServerState, receive: Receive, take: Callable[[int], None]) -> dict[str, Any]:
    """The JSON object of a request; a large one is parsed beside the event loop."""
    body = await read_body(receive, state.config.max_body_bytes, state.config.body_timeout, take)
    return await off_loop(state, parse_json, body) if len(body) > _BIG_BODY else parse_json(body)


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
            value = await read_request(self._state, receive, take)
            await until_disconnect(receive, self._work(served, call, value, scope, receive, send))

    async def _work(self, served: Served, call: Call, value: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        request = validate(self._model, value, ignore_unknown=self._state.config.ignore_unknown_fields)
        job = await self._prepare(self._state, served, request)
        await answer(self._state, served, call, job, scope, receive, send)


class JsonEndpoint:
    """An endpoint whose answer is one JSON object made from one JSON object."""

    def __init__(
        self, state: ServerState, work: Callable[[ServerState, Served, dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> None:
        self._state, self._work = state, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        served = self._state.require_served()
        with self._state.bodies.of_one_request() as take:
            body = await self._work(self._state, served, await read_request(self._state, receive, take))
        await Response(msgspec.json.encode(body), media_type="application/json")(scope, receive, send)


async def tokenize(state: ServerState, served: Served, value: dict[str, Any]) -> dict[str, Any]:
    """Token ids of a prompt, or of messages through the chat template."""
    ignore = state.config.ignore_unknown_fields
    text = served.require_text()
    request: TokenizePrompt | TokenizeMessages
    if value.get("messages") is not None:
        request = validate(TokenizeMessages, value, ignore_unknown=ignore)
        served.check_model(request.model)
        rendered = await off_loop(
            state,
            text.render,
            [message.for_template() for message in request.messages],
            add_generation_prompt=request.add_generation_prompt,
            continue_final=request.continue_final_message,
            extra=request.chat_template_kwargs,
        )
    else:
        request = validate(TokenizePrompt, value, ignore_unknown=ignore)
        served.check_model(request.model)
        given = request.prompt if request.prompt is not None else request.content
        if given is None:
            raise RequestError("wanted 'prompt', 'content' or 'messages', got none of them", param="prompt")
        rendered = given
    ids = await off_loop(state, text.encode, rendered, add_special_tokens=request.add_special_tokens)
    names = {"token_strs": [text.tokenizer.vocab_entry(one) for one in ids]} if request.return_token_strs else {}
    return {"tokens": ids, "count": len(ids), "max_model_len": served.card.max_model_len, **names}


async def detokenize(state: ServerState, served: Served, value: dict[str, Any]) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    request = validate(DetokenizeRequest, value, ignore_unknown=state.config.ignore_unknown_fields)
    served.check_model(request.model)
    text = served.require_text()
    if request.tokens:
        check_ids(request.tokens, served.card, param="tokens")
    return {"prompt": await off_loop(state, text.tokenizer.decode, request.tokens, skip_special_tokens=False)}


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
