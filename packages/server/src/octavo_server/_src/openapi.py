"""The API's description, made from the request models."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo_server._src.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeMessages, TokenizePrompt

_REF = "#/components/schemas/"
_BODIES: dict[str, tuple[str, tuple[type[BaseModel], ...]]] = {
    "/v1/completions": ("Continue a prompt", (CompletionRequest,)),
    "/v1/chat/completions": ("Continue a conversation", (ChatRequest,)),
    "/tokenize": ("Token ids of a text or a conversation", (TokenizePrompt, TokenizeMessages)),
    "/detokenize": ("Text of token ids", (DetokenizeRequest,)),
}
_READS = {
    "/v1/models": "Models served here",
    "/v1/models/{model}": "One model",
    "/health": "200 once a token can be made",
    "/version": "Version of the server",
    "/metrics": "Prometheus metrics",
    "/openapi.json": "This description",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@functools.cache
def openapi_json(version: str, *, needs_key: bool) -> bytes:
    """An OpenAPI 3.1 document."""
    models = {model for _, bodies in _BODIES.values() for model in bodies}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=_REF + "{model}")
    paths = {path: {"post": _operation(summary, bodies)} for path, (summary, bodies) in _BODIES.items()}
    paths |= {path: {"get": _operation(summary, (), has_id=path.endswith("}"))} for path, summary in _READS.items()}
    components: dict[str, Any] = {"schemas": {**schemas.get("$defs", {}), "Error": _ERROR}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version, "description": "OpenAI-compatible inference server"},
        "paths": paths,
        "components": components,
    }
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return msgspec.json.encode(document)


def _operation(summary: str, bodies: tuple[type[BaseModel], ...], *, has_id: bool = False) -> dict[str, Any]:
    error = {"description": "Refused", "content": {"application/json": {"schema": {"$ref": _REF + "Error"}}}}
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "Done"}, "default": error}}
    if bodies:
        refs = [{"$ref": _REF + model.__name__} for model in bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if has_id:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
