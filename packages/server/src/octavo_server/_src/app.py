"""The ASGI application: routes and middleware around one `ServerState`. Knows no socket and loads no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_core.wire import ModelCard
from octavo_models.text import ChatTemplate, Tokenizer
from octavo_server._src.chat import prepare_chat
from octavo_server._src.completions import prepare_completion
from octavo_server._src.config import ServerConfig
from octavo_server._src.endpoints import Generate, Information, JsonEndpoint, detokenize, tokenize, tokenize_kind
from octavo_server._src.middleware import ApiKeys, Errors, HttpMetrics, RequestIds
from octavo_server._src.openapi import openapi_json
from octavo_server._src.requests import ChatRequest, CompletionRequest, DetokenizeRequest
from octavo_server._src.state import ServerState
from octavo_server._src.text import Text
from octavo_server._src.version import VERSION

if TYPE_CHECKING:
    from octavo_core.seams import Engine
else:
    Engine = Any


def create_app(
    engine: Engine,
    card: ModelCard,
    tokenizer: Tokenizer | None,
    chat_template: ChatTemplate | None = None,
    config: ServerConfig | None = None,
) -> ASGIApp:
    """The whole API over an engine that is ready.

    Args:
        tokenizer: None serves token ids in and out.
        chat_template: None refuses chat.
        config: Host, port and shutdown do not matter here.
    """
    state = ServerState(config or ServerConfig())
    text = None if tokenizer is None else Text(tokenizer, chat_template, card.max_model_len)
    state.become_ready(engine, card, text)
    return build_app(state)


def build_app(state: ServerState) -> ASGIApp:
    """The API over a state that may become ready later; until then everything that needs a model is 503."""
    keys = state.keys
    routes = _routes(state, Information(state, VERSION, openapi_json(VERSION, needs_key=bool(keys))))
    router = Router(routes, redirect_slashes=False, default=_not_found)
    app: ASGIApp = ApiKeys(_WithApp(router), keys)
    return RequestIds(HttpMetrics(Errors(app), state.metrics, routes))


def _routes(state: ServerState, information: Information) -> list[Route]:
    return [
        Route("/v1/completions", Generate(state, CompletionRequest, prepare_completion), methods=["POST"]),
        Route("/v1/chat/completions", Generate(state, ChatRequest, prepare_chat), methods=["POST"]),
        Route("/v1/models", information.models),
        Route("/v1/models/{model:path}", information.model),
        Route("/tokenize", JsonEndpoint(state, tokenize_kind, tokenize), methods=["POST"]),
        Route("/detokenize", JsonEndpoint(state, lambda _: DetokenizeRequest, detokenize), methods=["POST"]),
        Route("/health", information.health),
        Route("/ready", information.ready),
        Route("/version", information.version),
        Route("/openapi.json", information.openapi),
        Route("/metrics", information.metrics),
    ]


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    raise HTTPException(404, f"there is no route {scope['method']} {scope['path'][:200]}")


class _WithApp:
    """Names the application in the scope: Starlette's routes then raise for a wrong method instead of answering in plain text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "app": self} if scope["type"] == "http" else scope, receive, send)
