"""GET /openapi.json, made from the types that check the bodies, and the page /docs that shows it."""

from __future__ import annotations

import importlib.resources
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.request import MAX_LOGPROBS, MAX_SAMPLES, MAX_SEED, MAX_STOP_STRINGS
from octavo.server import answers
from octavo.server.cache_routes import PinBody
from octavo.server.embeddings import EmbeddingsBody
from octavo.server.failures import json_response
from octavo.server.messages import CountTokensBody, MessagesBody
from octavo.server.responses import ResponsesBody
from octavo.server.schema import ChatBody, CompletionBody
from octavo.server.state import ServerState
from octavo.server.tokens import DetokenizeBody, TokenizeBody

REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route. `answer` None: plain text. `streams`: also as server-sent events."""

    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    required: tuple[str, ...] = ()
    streams: bool = False
    tag: str = "OpenAI"
    deletes: bool = False

    @property
    def method(self) -> str:
        if self.deletes:
            return "delete"
        return "get" if self.body is None else "post"


OPERATIONS = (
    Operation(
        path="/v1/chat/completions",
        summary="Answer a conversation",
        body=ChatBody,
        answer=answers.ChatCompletion,
        required=("model", "messages"),
        streams=True,
    ),
    Operation(
        path="/v1/completions",
        summary="Continue a text",
        body=CompletionBody,
        answer=answers.Completion,
        required=("model", "prompt"),
        streams=True,
    ),
    Operation(
        path="/v1/responses",
        summary="Answer a text or a conversation",
        body=ResponsesBody,
        answer=answers.ResponseAnswer,
        required=("model", "input"),
        streams=True,
    ),
    Operation(
        path="/v1/embeddings",
        summary="Turn texts into vectors",
        body=EmbeddingsBody,
        answer=answers.Embeddings,
        required=("model", "input"),
    ),
    Operation(path="/v1/models", summary="The served model", answer=answers.ModelList),
    Operation(path="/v1/models/{model}", summary="The served model by name", answer=answers.ModelCard),
    Operation(
        path="/v1/messages",
        summary="Answer a conversation",
        body=MessagesBody,
        answer=answers.MessageAnswer,
        required=("model", "messages", "max_tokens"),
        streams=True,
        tag="Anthropic",
    ),
    Operation(
        path="/v1/messages/count_tokens",
        summary="How many tokens a conversation takes",
        body=CountTokensBody,
        answer=answers.CountTokensAnswer,
        required=("model", "messages"),
        tag="Anthropic",
    ),
    Operation(
        path="/tokenize",
        summary="Token ids of a text or a conversation",
        body=TokenizeBody,
        answer=answers.TokenizeAnswer,
        tag="Octavo",
    ),
    Operation(
        path="/detokenize",
        summary="The text of token ids",
        body=DetokenizeBody,
        answer=answers.DetokenizeAnswer,
        required=("tokens",),
        tag="Octavo",
    ),
    Operation(
        path="/v1/usage",
        summary="What the key of this request has used, and its limits",
        answer=answers.KeyUsage,
        tag="Octavo",
    ),
    Operation(
        path="/v1/cache", summary="What the prefix cache holds, as trees", answer=answers.CacheReport, tag="Octavo"
    ),
    Operation(
        path="/v1/cache/pins",
        summary="Keep a prompt's prefix cached",
        body=PinBody,
        answer=answers.CachePin,
        required=("model", "ttl_seconds"),
        tag="Octavo",
    ),
    Operation(
        path="/v1/cache/pins/{id}",
        summary="Let go of a pinned prefix",
        answer=answers.CachePinDeleted,
        tag="Octavo",
        deletes=True,
    ),
    Operation(
        path="/v1/requests/{id}",
        summary="What happened to a live or recent request, by its X-Request-Id",
        answer=answers.RequestStory,
        tag="Octavo",
    ),
    Operation(path="/health", summary="200 while requests are served, else 503", answer=answers.Health, tag="Octavo"),
    Operation(path="/version", summary="The version of Octavo", answer=answers.Version, tag="Octavo"),
    Operation(path="/metrics", summary="Prometheus metrics", tag="Octavo"),
)

# One event of a stream.
EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "description": "JSON, or [DONE]"}},
    "required": ["data"],
}
# Lowest and highest values, wherever a field of this name occurs; a test holds them against the server.
LIMITS: dict[str, tuple[float | None, float | None]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), MAX_SEED),
    "n": (1, MAX_SAMPLES),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "min_tokens": (0, 2**31 - 1),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "top_logprobs": (0, MAX_LOGPROBS),
    "max_completion_tokens": (1, None),
    "max_output_tokens": (1, None),
}
MAX_ITEMS = {"stop": MAX_STOP_STRINGS, "stop_sequences": MAX_STOP_STRINGS, "stop_token_ids": 1024}


@cache
def describe(*, with_key: bool = False, lenient: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server with a key, or one that ignores unknown fields."""
    types = [t for op in OPERATIONS for t in (op.body, op.answer) if t is not None]
    _, components = msgspec.json.schema_components(
        [*dict.fromkeys(types), answers.Error, answers.AnthropicError], ref_template=REF
    )
    for op in OPERATIONS:
        if op.body is not None:
            _finish_body(components[op.body.__name__], op)
            if lenient:
                components[op.body.__name__].pop("additionalProperties", None)
    paths = {op.path: {op.method: _operation(op)} for op in OPERATIONS}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": octavo.__version__,
            "description": "Serves a language model. null always means: not given. Unknown fields are refused.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_key:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    return document


def _finish_body(schema: dict[str, Any], op: Operation) -> None:
    """What the types do not say: required fields (null counts as absent) and limits."""
    properties = schema["properties"]
    for name in op.required:
        field = properties[name]
        field.pop("default", None)
        options = [o for o in field.get("anyOf", ()) if o != {"type": "null"}]
        if options:
            field["anyOf"] = options
    if op.required:
        schema["required"] = list(op.required)
    for name, (low, high) in LIMITS.items():
        for option in properties.get(name, {}).get("anyOf", ()):
            if option.get("type") in ("integer", "number"):
                option |= {k: v for k, v in (("minimum", low), ("maximum", high)) if v is not None}
    for name, most in MAX_ITEMS.items():
        for option in properties.get(name, {}).get("anyOf", ()):
            if option.get("type") == "array":
                option["maxItems"] = most


def _operation(op: Operation) -> dict[str, Any]:
    if op.answer is None:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": _ref(op.answer)}}
    if op.streams:
        content["text/event-stream"] = {"schema": EVENT}
    error = answers.AnthropicError if op.path.startswith("/v1/messages") else answers.Error
    refused = {
        "description": "refused or failed; see docs/api.md",
        "content": {"application/json": {"schema": _ref(error)}},
    }
    made: dict[str, Any] = {
        "operationId": f"{op.method}{op.path}".replace("/", "_").translate({ord("{"): None, ord("}"): None}),
        "summary": op.summary,
        "tags": [op.tag],
        "responses": {"200": {"description": "the answer", "content": content}, "default": refused},
    }
    if op.body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(op.body)}}}
    names = re.findall(r"{(\w+)}", op.path)
    if names:
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return made


def _ref(schema: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": REF.format(name=schema.__name__)}


async def openapi(request: Request, state: ServerState) -> Response:
    with_key, lenient = state.accounts is not None, state.settings.ignore_unknown_fields
    return json_response(describe(with_key=with_key, lenient=lenient))


async def docs_page(request: Request, state: ServerState) -> Response:
    page = (importlib.resources.files("octavo.server") / "ui" / "docs.html").read_text(encoding="utf-8")
    policy = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return Response(page, media_type="text/html", headers={"Content-Security-Policy": policy})
