"""ASGI middleware around every request: the API key, and a request id on every answer."""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.failures import plain_error_response

# What a load balancer or a browser may see without the key: nothing about the model or its users.
OPEN_PATHS = frozenset({"/health", "/version", "/docs", "/openapi.json"})

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class Envelope:
    """Refuses requests without the key (except OPEN_PATHS) and sets X-Request-Id.

    A client's own X-Request-Id is echoed if it is short and plain, and `GET /v1/requests/ID` finds the
    request by it; the engine never sees it.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        if self._key is None or scope["path"] in OPEN_PATHS or self._authorised(scope):
            await self._app(scope, receive, send_with_id)
        else:
            response = plain_error_response(
                scope["path"],
                "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY",
                "invalid_request_error",
                "invalid_api_key",
                401,
                {"WWW-Authenticate": "Bearer"},
            )
            await response(scope, receive, send_with_id)

    def _authorised(self, scope: Scope) -> bool:
        """Exactly one header with the key, compared in constant time: Authorization, or Anthropic's x-api-key."""
        assert self._key is not None
        given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
        if len(given) != 1:
            return False
        name, value = given[0]
        if name == b"x-api-key":
            return hmac.compare_digest(value.strip(), self._key)
        scheme, _, key = value.partition(b" ")  # the scheme is in any case (RFC 9110)
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()
