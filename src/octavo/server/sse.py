"""Answers a generation over HTTP: one JSON object, or server-sent events; ends it when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError
from octavo.server.explained import explain
from octavo.server.failures import ClientGoneError, DeadlineError, error_object, error_response, json_response
from octavo.server.generation import Generation, Update
from octavo.server.wire import GenerationError

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def frame(content: Any) -> bytes:
    """One event of a stream (WHATWG server-sent events); JSON holds no raw line feed."""
    return b"data: " + _encoder.encode(content) + b"\n\n"


def named_frame(name: str, content: dict[str, Any]) -> bytes:
    """The same with a name, which clients may dispatch on; it is the content's `type` too."""
    return f"event: {name}\n".encode() + frame({"type": name, **content})


class Renderer(Protocol):
    """Turns updates into the JSON of one route."""

    def opening(self) -> list[bytes]:
        """Frames that come before any update."""
        ...

    def chunks(self, update: Update) -> list[bytes]: ...

    def closing(self) -> list[bytes]:
        """Frames after the last update, up to the end of the stream."""
        ...

    def broken(self, error: OctavoError) -> list[bytes]:
        """The last frames of a stream that fails after it started."""
        ...

    def refusal(self, error: OctavoError) -> Response:
        """The answer when nothing was sent yet."""
        ...

    def full(self) -> dict[str, Any]:
        """The whole answer, once the generation is done."""
        ...


class OpenAiErrors:
    """How completions and chat report a failure: OpenAI's error object, in a stream followed by [DONE]."""

    def broken(self, error: OctavoError) -> list[bytes]:
        return [frame(error_object(error)), DONE]

    def refusal(self, error: OctavoError) -> Response:
        return error_response(error)


class GenerationResponse:
    """An ASGI response: admits the generation, then streams it or waits for its end.

    Nothing is sent before the first news arrive (or the first keep-alive is due), so that whatever goes
    wrong before that is a real HTTP status.
    """

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        *,
        stream: bool,
        explained: bool = False,
        keep_alive: float | None = None,
        on_start: Callable[[Scope], None] = lambda scope: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._generation = generation
        self._renderer = renderer
        self._stream = stream
        self._explained = explained
        self._keep_alive = keep_alive
        self._on_start = on_start
        self._on_end = on_end
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._on_start(scope)
        watcher = asyncio.create_task(self._watch(receive))
        error: BaseException | None = None
        deadline = scope.get("state", {}).get("deadline")
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await self._answer(scope, receive, send)
        except ClientGoneError:
            pass
        except TimeoutError:
            error = DeadlineError()
            await self._report(error, scope, receive, send)
        except OctavoError as e:
            error = e
            await self._report(e, scope, receive, send)
        except Exception as e:
            error = e
            logger.exception("a request failed")
            await self._report(GenerationError("internal error"), scope, receive, send)
        except BaseException as e:
            error = e
            raise
        finally:
            self._generation.close(error)
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            self._on_end()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.client_gone()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generation.submit()
        if self._stream:
            await self._send_stream(send)
            return
        while not self._generation.done:
            await self._generation.updates()
        if self._explained:
            await explain(self._generation)
        await json_response(self._renderer.full())(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        async for updates in self._all_updates():
            frames = []
            if not self._started:
                await self._start(send)
                frames += self._renderer.opening()
            if updates is None:
                frames.append(KEEP_ALIVE)
            for update in updates or ():
                frames += self._renderer.chunks(update)
            if frames:
                await self._send_body(send, b"".join(frames))
        if self._explained:
            await explain(self._generation)
        await self._send_body(send, b"".join(self._renderer.closing()), more=False)

    async def _all_updates(self) -> AsyncIterator[list[Update] | None]:
        """Updates until the end; None whenever a keep-alive is due."""
        while not self._generation.done:
            if self._keep_alive is None:
                yield await self._generation.updates()
                continue
            try:
                async with asyncio.timeout(self._keep_alive):
                    updates = await self._generation.updates()
            except TimeoutError:
                yield None
            else:
                yield updates

    async def _start(self, send: Send) -> None:
        self._started = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # proxies of the nginx kind must not collect the stream
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_body(self, send: Send, body: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _report(self, error: OctavoError, scope: Scope, receive: Receive, send: Send) -> None:
        """A real status while nothing was sent; otherwise error frames and the end of the stream."""
        if self._started:
            await self._send_body(send, b"".join(self._renderer.broken(error)), more=False)
        else:
            await self._renderer.refusal(error)(scope, receive, send)
