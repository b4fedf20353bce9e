"""The HTTP application: routes, and what happens to an error on its way out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import octavo
from octavo.errors import EngineError, OctavoError
from octavo.server.cache_routes import create_pin, delete_pin, list_cache
from octavo.server.chat import create_chat_completion
from octavo.server.client import EngineClient
from octavo.server.completions import create_completion
from octavo.server.embeddings import create_embeddings
from octavo.server.envelope import Envelope
from octavo.server.failures import (
    ModelUnknownError,
    NoKeysError,
    RequestUnknownError,
    anthropic_error_response,
    error_response,
    json_response,
    plain_error_response,
    speaks_anthropic,
)
from octavo.server.health import health
from octavo.server.messages import count_tokens, create_message
from octavo.server.metrics import CONTENT_TYPE
from octavo.server.openapi import docs_page, openapi
from octavo.server.responses import create_response
from octavo.server.state import ServerSettings, ServerState
from octavo.server.tenants import tenant_of
from octavo.server.tokens import detokenize, tokenize
from octavo.text.tokenizer import Tokenizer

__all__ = ["ServerSettings", "ServerState", "create_app"]

logger = logging.getLogger(__name__)

STATS_SECONDS = 2.0


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
            Route("/v1/responses", _guard(create_response), methods=["POST"]),
            Route("/v1/messages", _guard(create_message), methods=["POST"]),
            Route("/v1/messages/count_tokens", _guard(count_tokens), methods=["POST"]),
            Route("/v1/embeddings", _guard(create_embeddings), methods=["POST"]),
            Route("/tokenize", _guard(tokenize), methods=["POST"]),
            Route("/detokenize", _guard(detokenize), methods=["POST"]),
            Route("/v1/models", _guard(list_models), methods=["GET"]),
            Route("/v1/models/{model:path}", _guard(get_model), methods=["GET"]),
            Route("/v1/usage", _guard(get_usage), methods=["GET"]),
            Route("/v1/cache", _guard(list_cache), methods=["GET"]),
            Route("/v1/cache/pins", _guard(create_pin), methods=["POST"]),
            Route("/v1/cache/pins/{id}", _guard(delete_pin), methods=["DELETE"]),
            Route("/v1/requests/{id:path}", _guard(get_request), methods=["GET"]),
            Route("/openapi.json", _guard(openapi), methods=["GET"]),
            Route("/docs", _guard(docs_page), methods=["GET"]),
            Route("/health", _guard(health), methods=["GET"]),
            Route("/version", _guard(version), methods=["GET"]),
            Route("/metrics", _guard(metrics), methods=["GET"]),
        ],
        middleware=_middleware(state),
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _middleware(state: ServerState) -> list[Middleware]:
    """Outermost first: a preflight of a browser carries no key (Fetch standard)."""

    def cors(app: ASGIApp) -> ASGIApp:
        return CORSMiddleware(
            app,
            allow_origins=state.settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )

    def envelope(app: ASGIApp) -> ASGIApp:
        return Envelope(app, state.accounts, state.settings.request_timeout, state.metrics.responded)

    return [*([Middleware(cors)] if state.settings.cors_origins else []), Middleware(envelope)]


Endpoint = Callable[[Request, ServerState], Awaitable[Any]]


def _guard(endpoint: Endpoint) -> Callable[[Request], Awaitable[Any]]:
    """Errors of an endpoint become JSON, whatever they are."""

    async def guarded(request: Request) -> Any:
        try:
            return await endpoint(request, request.app.state.server)
        except OctavoError as e:
            return anthropic_error_response(e) if speaks_anthropic(request.url.path) else error_response(e)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except Exception:
            logger.exception("a request failed")
            return plain_error_response(request.url.path, "internal error", "server_error", "internal_error", 500)

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
    headers = dict(exc.headers or {})
    return plain_error_response(request.url.path, message, "invalid_request_error", code, exc.status_code, headers)


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


async def get_usage(request: Request, state: ServerState) -> Response:
    """What the key of this request has used, and its limits."""
    account = request.scope["state"].get("account")
    if account is None:
        raise NoKeysError
    return json_response(account.describe())


async def get_request(request: Request, state: ServerState) -> Response:
    """What happened to a live or recent request, by its X-Request-Id."""
    if not state.settings.explain:
        raise RequestUnknownError
    return json_response(await state.book.describe(request.path_params["id"], tenant_of(request.scope)))


async def version(request: Request, state: ServerState) -> Response:
    return json_response({"version": octavo.__version__})


async def metrics(request: Request, state: ServerState) -> Response:
    """A busy engine answers between two steps; it is not waited for longer than a scraper would."""
    stats = None
    with contextlib.suppress(EngineError, TimeoutError):
        async with asyncio.timeout(STATS_SECONDS):
            stats = await state.client.stats()
    text = state.metrics.render(stats, num_restarts=state.client.num_restarts, num_in_flight=state.num_in_flight)
    return Response(text, media_type=CONTENT_TYPE)
