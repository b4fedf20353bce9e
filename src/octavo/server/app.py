"""The HTTP application: routes, limits, keys and request ids around the two generation routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import octavo
from octavo.errors import EngineError, OctavoError
from octavo.request import SamplingParams
from octavo.server import chat, completions
from octavo.server.client import EngineClient
from octavo.server.envelope import Envelope
from octavo.server.failures import (
    BodyTooLargeError,
    ModelUnknownError,
    error_fields,
    error_response,
    json_response,
)
from octavo.server.generation import Generation, Prompt
from octavo.server.metrics import CONTENT_TYPE, ServerMetrics
from octavo.server.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    LenientChatBody,
    LenientCompletionBody,
    check_num_choices,
    check_supported,
    decode_body,
    refuse,
    sampling_params,
)
from octavo.server.sse import GenerationResponse, Renderer
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=GenerationBody)

# Below this size, work on a body takes less time than handing it to a thread is worth.
INLINE_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What the application needs to know besides the engine. Sizes in bytes, times in seconds."""

    model_name: str
    max_model_len: int
    vocab_size: int
    model_root: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 32 * 1024 * 1024
    ignore_unknown_fields: bool = False
    sse_keep_alive: float | None = None
    chat_template: str | None = None
    trust_special_tokens: bool = False
    # Sampling values of the model's generation_config.
    presets: Mapping[str, Any] = field(default_factory=dict)


class ServerState:
    """What all requests share. `draining`: no new generations; `num_in_flight`: those being answered."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = ServerMetrics(settings.model_name)
        self.created = int(time.time())
        self.draining = False
        self.num_in_flight = 0
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="octavo-text")

    def enter(self) -> None:
        self.num_in_flight += 1

    def leave(self) -> None:
        self.num_in_flight -= 1

    def check_open(self) -> None:
        if self.draining:
            raise EngineError("the server is shutting down")
        if not self.client.healthy:
            raise EngineError("the engine is not running")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` here if the body is small (`size` in bytes), else in a worker thread."""
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)


def create_app(client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> Starlette:
    """The application; its lifespan starts and closes `client`. `app.state.server` is the ServerState."""
    state = ServerState(client, tokenizer, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await client.start()
        try:
            yield
        finally:
            await client.close()
            state.close()

    app = Starlette(
        routes=[
            Route("/v1/completions", _guard(create_completion), methods=["POST"]),
            Route("/v1/chat/completions", _guard(create_chat_completion), methods=["POST"]),
            Route("/v1/models", _guard(list_models), methods=["GET"]),
            Route("/v1/models/{model:path}", _guard(get_model), methods=["GET"]),
            Route("/health", _guard(health), methods=["GET"]),
            Route("/version", _guard(version), methods=["GET"]),
            Route("/metrics", _guard(metrics), methods=["GET"]),
        ],
        middleware=[Middleware(_envelope, api_key=settings.api_key)],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _envelope(app: ASGIApp, api_key: str | None) -> ASGIApp:
    return Envelope(app, api_key)


Endpoint = Callable[[Request, ServerState], Awaitable[Any]]


def _guard(endpoint: Endpoint) -> Callable[[Request], Awaitable[Any]]:
    """Errors of an endpoint become JSON, whatever they are."""

    async def guarded(request: Request) -> Any:
        try:
            return await endpoint(request, request.app.state.server)
        except OctavoError as e:
            return error_response(e)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except Exception:
            logger.exception("a request failed")
            return json_response(error_fields("internal error", "server_error", None, "internal_error"), 500)

    return guarded


async def _http_error(request: Request, exc: Exception) -> Response:
    """404 and 405 of the router, as JSON."""
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405:
        message, code = "this path does not take that method", "method_not_allowed"
    elif exc.status_code == 404:
        message, code = "no such path", "not_found"
    else:
        message, code = str(exc.detail), None
    content = error_fields(message, "invalid_request_error", None, code)
    return json_response(content, exc.status_code, dict(exc.headers or {}))


# ---------------------------------------------------------------------------- generation


@dataclass(frozen=True, slots=True)
class _Parsed(Generic[BodyT]):
    """A body that passed all checks that need no tokenizer. `size` in bytes."""

    body: BodyT
    params: SamplingParams
    size: int


async def create_completion(request: Request, state: ServerState) -> GenerationResponse:
    lenient = state.settings.ignore_unknown_fields
    parsed = await _read(request, state, LenientCompletionBody if lenient else CompletionBody)
    body, skip_special = parsed.body, parsed.params.skip_special_tokens
    prompts = await state.run(parsed.size, lambda: completions.make_prompts(state.tokenizer, body, skip_special))
    check_num_choices(len(prompts), parsed.params.n)
    for prompt in prompts:
        _finish_prompt(prompt, body, state, "prompt")
        if body.echo and prompt.num_truncated:
            prompt.text = state.tokenizer.decode(prompt.token_ids, skip_special_tokens=skip_special)
    generation = _generation(state, prompts, parsed, "prompt")
    renderer = completions.CompletionRenderer(state.tokenizer, generation, _base(state, "cmpl-"), body)
    return _response(state, generation, renderer, body)


async def create_chat_completion(request: Request, state: ServerState) -> GenerationResponse:
    settings = state.settings
    parsed = await _read(request, state, LenientChatBody if settings.ignore_unknown_fields else ChatBody)
    body = parsed.body

    def make_prompt() -> Prompt:
        return chat.make_prompt(
            state.tokenizer,
            body,
            chat_template=settings.chat_template,
            trust_special_tokens=settings.trust_special_tokens,
        )

    prompt = await state.run(parsed.size, make_prompt)
    _finish_prompt(prompt, body, state, "messages")
    generation = _generation(state, [prompt], parsed, "messages")
    renderer = chat.ChatRenderer(state.tokenizer, generation, _base(state, "chatcmpl-"), body)
    return _response(state, generation, renderer, body)


async def _read(request: Request, state: ServerState, body_type: type[BodyT]) -> _Parsed[BodyT]:
    """Everything that can be refused without the tokenizer is refused here."""
    state.check_open()
    raw = await _read_body(request, state.settings.max_body_bytes)
    # Parsing is some 50 times faster than tokenising.
    body = await state.run(len(raw) // 50, lambda: decode_body(raw, body_type))
    if body.model is None:
        raise refuse("model is required", "model", code="missing_field")
    if body.model != state.settings.model_name:
        raise ModelUnknownError
    check_supported(body)
    return _Parsed(body, sampling_params(body, state.settings.presets), len(raw))


async def _read_body(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:18]) > limit:
        raise BodyTooLargeError(limit)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise BodyTooLargeError(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _finish_prompt(prompt: Prompt, body: GenerationBody, state: ServerState, param: str) -> None:
    """Check the ids of one prompt and cut it if truncate_prompt_tokens asks for it."""
    ids, vocab_size = prompt.token_ids, state.settings.vocab_size
    if not ids:
        raise refuse(f"{param} holds no tokens", param, code="empty_prompt")
    if not (min(ids) >= 0 and max(ids) < vocab_size):
        raise refuse(f"{param} must hold token ids from 0 to {vocab_size - 1}", param, code="invalid_token_id")
    keep = body.truncate_prompt_tokens
    if keep is None:
        return
    if keep < 1 and keep != -1:
        raise refuse("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")
    if keep == -1:
        keep = state.settings.max_model_len - 1
    if len(ids) > keep:
        prompt.num_truncated = len(ids) - keep
        prompt.token_ids = ids[-keep:]


def _generation(state: ServerState, prompts: list[Prompt], parsed: _Parsed[Any], param: str) -> Generation:
    return Generation(
        state.client,
        state.tokenizer,
        state.metrics,
        prompts,
        parsed.params,
        cache_salt=parsed.body.cache_salt or "",
        priority=parsed.body.priority or 0,
        param=param,
    )


def _response(
    state: ServerState, generation: Generation, renderer: Renderer, body: GenerationBody
) -> GenerationResponse:
    return GenerationResponse(
        generation,
        renderer,
        stream=bool(body.stream),
        keep_alive=state.settings.sse_keep_alive,
        on_start=state.enter,
        on_end=state.leave,
    )


def _base(state: ServerState, prefix: str) -> dict[str, Any]:
    return {
        "id": prefix + uuid.uuid4().hex,
        "object": "",
        "created": int(time.time()),
        "model": state.settings.model_name,
        "system_fingerprint": f"octavo-{octavo.__version__}",
    }


# ---------------------------------------------------------------------------- the rest


def _model_card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.settings.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "octavo",
        "root": state.settings.model_root or state.settings.model_name,
        "max_model_len": state.settings.max_model_len,
    }


async def list_models(request: Request, state: ServerState) -> Response:
    return json_response({"object": "list", "data": [_model_card(state)]})


async def get_model(request: Request, state: ServerState) -> Response:
    if request.path_params["model"] != state.settings.model_name:
        raise ModelUnknownError
    return json_response(_model_card(state))


async def health(request: Request, state: ServerState) -> Response:
    """200 while requests are served; 503 while shutting down or without an engine."""
    state.check_open()
    return json_response({"status": "ok"})


async def version(request: Request, state: ServerState) -> Response:
    return json_response({"version": octavo.__version__})


async def metrics(request: Request, state: ServerState) -> Response:
    stats = None
    with contextlib.suppress(EngineError):
        stats = await state.client.stats()
    return Response(state.metrics.render(stats), media_type=CONTENT_TYPE)
