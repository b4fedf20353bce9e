"""ASGI middleware around every request: the API key and its limits, the deadline, and a request id on every answer."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo import logs
from octavo.server.failures import plain_error_response
from octavo.server.quotas import Account, Accounts, KeyLimitError

# What a load balancer or a browser may see without the key: nothing about the model or its users.
OPEN_PATHS = frozenset({"/health", "/version", "/docs", "/openapi.json"})
MAX_TIMEOUT = 86400.0

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_SECONDS = re.compile(rb"[0-9]{1,6}(\.[0-9]{1,6})?")


class Envelope:
    """Refuses requests without a key (except OPEN_PATHS) and beyond its limits, and sets X-Request-Id.

    A client's own X-Request-Id is echoed if it is short and plain, and `GET /v1/requests/ID` finds the
    request by it; the engine never sees it. What later parts want to know is in `scope["state"]`:
    `request_id`, `tenant` (whose cached prefixes it may use), `key_name`, `account`, `spent` and
    `deadline` (time.monotonic; None: none).
    """

    def __init__(
        self,
        app: ASGIApp,
        accounts: Accounts | None,
        request_timeout: float | None = None,
        on_status: Callable[[int], None] = lambda status: None,
    ) -> None:
        """Without `accounts` there are no keys. `request_timeout` in seconds is the most a client may ask for.

        `on_status` hears the status of every answer.
        """
        self._on_status = on_status
        self._app = app
        self._accounts = accounts
        self._request_timeout = request_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        logs.request_id.set(state["request_id"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._on_status(message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            timeout = self._timeout(scope)
        except ValueError:
            response = plain_error_response(
                scope["path"], "X-Request-Timeout must be a number of seconds above 0", "invalid_request_error",
                "invalid_value", 400,
            )  # fmt: skip
            await response(scope, receive, send_with_id)
            return
        state["deadline"] = None if timeout is None else begun + timeout
        if self._accounts is None or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send_with_id)
        elif (account := self._account(scope, self._accounts)) is not None:
            await self._serve(account, scope, receive, send_with_id)
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

    async def _serve(self, account: Account, scope: Scope, receive: Receive, send: Send) -> None:
        """Only requests that may compute something count against limits."""
        scope["state"].update(tenant=account.key.tenant, key_name=account.key.name, account=account)
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            spent = account.enter()
        except KeyLimitError as e:
            headers = {"Retry-After": str(e.retry_after)}
            response = plain_error_response(scope["path"], e.message, "rate_limit_error", e.code, e.status, headers)
            await response(scope, receive, send)
            return
        scope["state"]["spent"] = spent
        try:
            await self._app(scope, receive, send)
        finally:
            account.leave(spent)

    def _account(self, scope: Scope, accounts: Accounts) -> Account | None:
        """Of exactly one header with a key: Authorization, or Anthropic's x-api-key."""
        given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
        if len(given) != 1:
            return None
        name, value = given[0]
        if name == b"authorization":
            scheme, _, value = value.partition(b" ")
            if scheme.lower() != b"bearer":  # the scheme is in any case (RFC 9110)
                return None
        return accounts.find(value.strip())

    def _timeout(self, scope: Scope) -> float | None:
        """Seconds; the shorter of the server's and the client's. ValueError."""
        given = [value for name, value in scope["headers"] if name == b"x-request-timeout"]
        if not given:
            return self._request_timeout
        if len(given) > 1 or not _SECONDS.fullmatch(given[0]) or not 0 < float(given[0]) <= MAX_TIMEOUT:
            raise ValueError
        return min(float(given[0]), self._request_timeout or MAX_TIMEOUT)


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()
