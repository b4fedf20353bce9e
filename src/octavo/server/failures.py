"""How errors look over HTTP: OpenAI's error object and a status, always bounded."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from octavo.errors import EngineError, OctavoError, QueueFullError, RequestError
from octavo.server.wire import GenerationError

MAX_MESSAGE_LENGTH = 1000


class ModelUnknownError(RequestError):
    """The request names a model that is not served here."""

    status = 404

    def __init__(self) -> None:
        super().__init__("no such model is served here; see GET /v1/models", param="model", code="model_not_found")


class RequestUnknownError(RequestError):
    """GET /v1/requests/ID of a request that was not made here, or too long ago."""

    status = 404

    def __init__(self) -> None:
        super().__init__("no recent request has this X-Request-Id", param="id", code="request_not_found")


class NoKeysError(RequestError):
    """GET /v1/usage of a server without keys."""

    status = 404

    def __init__(self) -> None:
        super().__init__("this server has no keys, so it counts no usage", code="no_keys")


class PinUnknownError(RequestError):
    """DELETE of a pin that is not there, or belongs to another tenant."""

    status = 404

    def __init__(self) -> None:
        super().__init__("no such pin; see GET /v1/cache", param="id", code="pin_not_found")


class PinLimitError(RequestError):
    """The prompt was computed, but pins hold as much as they may."""

    status = 409

    def __init__(self, num_pinned: int, max_pinned: int) -> None:
        super().__init__(
            f"pins hold {num_pinned} of at most {max_pinned} KV blocks, or all of the quota; delete one first",
            code="pin_limit",
        )


class BodyTooLargeError(RequestError):
    """The request body exceeds --max-body-size."""

    status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body exceeds {limit} bytes", code="body_too_large")


class BodyTimeoutError(RequestError):
    """The client stopped sending in the middle of its body."""

    status = 408

    def __init__(self, seconds: float) -> None:
        super().__init__(f"nothing of the request body came for {seconds:g} s", code="body_timeout")


class DeadlineError(GenerationError):
    """The answer took longer than --request-timeout or the client's X-Request-Timeout."""

    def __init__(self) -> None:
        super().__init__("the answer took longer than the time given to this request")


class ClientGoneError(OctavoError):
    """The client closed the connection; there is nobody to answer."""


def error_object(error: OctavoError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}."""
    param = code = None
    kind = "server_error"
    if isinstance(error, RequestError):
        param, code = error.param, error.code
        kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    elif isinstance(error, DeadlineError):
        code = "request_timeout"
    elif isinstance(error, GenerationError):
        code = "generation_failed"
    elif isinstance(error, EngineError):
        code = "engine_unavailable"
    return error_fields(str(error), kind, param, code)


def error_fields(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    if len(message) > MAX_MESSAGE_LENGTH:
        message = message[:MAX_MESSAGE_LENGTH] + "…"
    return {"error": {"message": message, "type": kind, "param": param and param[:100], "code": code}}


def status_of(error: OctavoError) -> int:
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, DeadlineError):
        return 504
    return 503 if isinstance(error, EngineError) and not isinstance(error, GenerationError) else 500


def error_response(error: OctavoError) -> Response:
    return json_response(error_object(error), status_of(error), _retry_headers(error))


def _retry_headers(error: OctavoError) -> dict[str, str]:
    if isinstance(error, QueueFullError):
        return {"Retry-After": str(error.retry_after)}
    return {"Retry-After": "1"} if status_of(error) == 503 else {}


# Anthropic's names for kinds of errors, by HTTP status.
ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def speaks_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


def anthropic_error(error: OctavoError) -> dict[str, Any]:
    return in_anthropic_words(error_object(error), status_of(error))


def in_anthropic_words(content: dict[str, Any], status: int) -> dict[str, Any]:
    """{"type": "error", "error": {type, message}} of an OpenAI error object."""
    kind = ANTHROPIC_KINDS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": content["error"]["message"]}}


def anthropic_error_response(error: OctavoError) -> Response:
    return json_response(anthropic_error(error), status_of(error), _retry_headers(error))


def plain_error_response(
    path: str, message: str, kind: str, code: str | None, status: int, headers: dict[str, str] | None = None
) -> Response:
    """An error that has no exception, in the words of the protocol that `path` speaks."""
    content = error_fields(message, kind, None, code)
    if speaks_anthropic(path):
        content = in_anthropic_words(content, status)
    return json_response(content, status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
