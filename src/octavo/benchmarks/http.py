"""A small HTTP/1.1 client for streamed answers: one connection per request, no work per byte that is not needed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from octavo.errors import ConfigError

MAX_HEAD = 64 * 1024
MAX_ERROR_BODY = 64 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """A server: where to connect, and the path before /completions."""

    host: str
    port: int
    path: str
    tls: bool
    api_key: str | None = None

    @classmethod
    def parse(cls, base_url: str, api_key: str | None = None) -> Target:
        """`base_url` with or without its /v1, as OpenAI's clients take it. Raises ConfigError."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError:
            raise ConfigError(f"base-url: {base_url[:100]!r} is not a URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"base-url: {base_url[:100]!r} is not an http:// or https:// URL")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api-key: only printable ASCII characters can be sent")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/")
        return cls(
            parts.hostname,
            port or (443 if tls else 80),
            path if path.endswith("/v1") else f"{path}/v1",
            tls,
            api_key,
        )

    def head(self, method: str, path: str, num_bytes: int) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Connection: close"]
        lines += ["User-Agent: octavo-bench", "Accept-Encoding: identity"]
        if num_bytes:
            lines += ["Content-Type: application/json", f"Content-Length: {num_bytes}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class HttpError(Exception):
    """The exchange broke: no connection, not HTTP, or cut off. The message is one bounded line."""


class Exchange(asyncio.Protocol):
    """One request and its answer. `on_body` gets the body's bytes as they come, if the status is 200.

    After `finished` is done: `status`, and for another status than 200 `error_body` (cut off at 64 KiB).
    """

    def __init__(self, request: bytes, on_body: Callable[[bytes], None]) -> None:
        self._request = request
        self._on_body = on_body
        self._buffer = b""
        self._in_head = True
        self._chunked = False
        self._left: int | None = None  # bytes of the body or chunk still to come; None: until the connection closes
        self._transport: asyncio.Transport | None = None
        self.status = 0
        self.error_body = b""
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.finished.done():
            return
        try:
            self._feed(self._buffer + data if self._buffer else data)
        except HttpError as error:
            self._finish(error)
        except ValueError:
            self._finish(HttpError("the answer is not HTTP/1.1"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.finished.done():
            return
        if exc is None and not self._in_head and not self._chunked and self._left is None:
            self._finish(None)
        else:
            self._finish(HttpError("the connection closed in the middle of the answer"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _finish(self, error: HttpError | None) -> None:
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error)
        self.close()

    def _feed(self, data: bytes) -> None:
        if self._in_head:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD:
                    raise HttpError("the answer's headers have no end")
                self._buffer = data
                return
            self._read_head(data[:end])
            data = data[end + 4 :]
        self._buffer = b""
        if self._chunked:
            self._feed_chunks(data)
            return
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        self._emit(data)
        if self._left == 0:
            self._finish(None)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, status, *_ = first.split(b" ", 2)
        if not version.startswith(b"HTTP/1."):
            raise ValueError
        self.status = int(status)
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
        if not self._chunked and b"content-length" in headers:
            self._left = int(headers[b"content-length"])
        self._in_head = False

    def _feed_chunks(self, data: bytes) -> None:
        """Chunked coding: size in hex, CRLF, that many bytes, CRLF; a chunk of size 0 ends the body."""
        at = 0
        while True:
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(data[at:line_end].partition(b";")[0], 16)
            if size == 0:
                self._finish(None)
                return
            start = line_end + 2
            if len(data) < start + size + 2:
                break
            self._emit(data[start : start + size])
            at = start + size + 2
        self._buffer = data[at:]

    def _emit(self, data: bytes) -> None:
        if not data:
            return
        if self.status == 200:
            self._on_body(data)
        elif len(self.error_body) < MAX_ERROR_BODY:
            self.error_body += data


async def fetch(
    target: Target, method: str, path: str, body: bytes, on_body: Callable[[bytes], None], timeout: float
) -> tuple[int, bytes]:
    """Sends one request; returns status and, unless that is 200, the answer's body. Raises HttpError."""
    loop = asyncio.get_running_loop()
    exchange: Exchange | None = None
    try:
        async with asyncio.timeout(timeout):
            _, exchange = await loop.create_connection(
                lambda: Exchange(target.head(method, path, len(body)) + body, on_body),
                target.host,
                target.port,
                ssl=ssl.create_default_context() if target.tls else None,
            )
            await exchange.finished
    except TimeoutError:
        raise HttpError(f"no complete answer within {timeout:g} s") from None
    except OSError as error:
        raise HttpError(f"cannot talk to {target.host}:{target.port}: {error.strerror or error}"[:300]) from None
    finally:
        if exchange is not None:
            exchange.close()
    return exchange.status, exchange.error_body
