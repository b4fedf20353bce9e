"""The front end's view of an engine: submit requests, wait for their events; and the engine in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import EngineError, OctavoError
from octavo.events import OutputEvent
from octavo.server.heart import Pulse
from octavo.server.loop import EngineLoop
from octavo.server.wire import (
    Abort,
    Admitted,
    Command,
    Events,
    Explain,
    Explained,
    Failed,
    FinishSequence,
    GetCache,
    GetStats,
    Message,
    Refused,
    Shutdown,
    Stats,
    Submit,
    SubmitSpec,
    Told,
    Unpin,
    from_wire,
)

if TYPE_CHECKING:
    from octavo.engine import Engine


MAX_PENDING = 65536


class RequestHandle:
    """The events of one submission (one or several prompts), in order. Always `close()` it.

    Used from the event loop only. Memory is bounded: whoever takes so little that MAX_PENDING tokens and
    alternatives pile up is given up.
    """

    def __init__(self, request_ids: Sequence[str], release: Callable[[RequestHandle], None]) -> None:
        self.request_ids = tuple(request_ids)
        self._release = release
        self._pending: deque[OutputEvent] = deque()
        self._news = asyncio.Event()
        self._error: OctavoError | None = None
        self.closed = False
        self._weight = 0
        self._on_overflow: Callable[[], None] | None = None
        # Requests that may still be running in the engine.
        self.open_ids = set(request_ids)

    def put(self, event: OutputEvent) -> None:
        self._pending.append(event)
        self._news.set()
        num_top = len(event.logprobs[0].top) if event.logprobs else 0
        self._weight += len(event.token_ids) * (1 + num_top)
        if self._weight > MAX_PENDING and self._on_overflow is not None:
            self._on_overflow()

    def watch_overflow(self, give_up: Callable[[], None]) -> None:
        """`give_up` is called when the reader is so far behind that its answer is given up; perhaps it is already."""
        self._on_overflow = give_up
        if self._weight > MAX_PENDING:
            give_up()

    def fail(self, error: OctavoError) -> None:
        """Every later `next_events` raises `error` once the events before it are taken."""
        if self._error is None:
            self._error = error
        self._news.set()

    async def next_events(self) -> list[OutputEvent]:
        """Waits for news; returns all there is, at least one event. Raises EngineError if the engine is gone."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        events = list(self._pending)
        self._pending.clear()
        self._weight = 0
        return events

    def finished(self, request_id: str) -> None:
        """The last event of this request has been taken; nothing is left to abort."""
        self.open_ids.discard(request_id)

    def close(self) -> None:
        """Gives up whatever is unfinished: its blocks are freed before the next step. Idempotent."""
        if not self.closed:
            self.closed = True
            self._release(self)


class EngineClient(Protocol):
    """What the HTTP layer needs of an engine, wherever that runs. All methods belong to one event loop."""

    @property
    def healthy(self) -> bool: ...

    @property
    def failure(self) -> OctavoError | None:
        """Why the engine is gone; None while it is healthy."""
        ...

    @property
    def state(self) -> str:
        """ "running"; "stalled": its process stands still; "restarting" or "hanging" while requests are kept for
        the next engine; "failed" for ever."""
        ...

    @property
    def pulse(self) -> Pulse:
        """Told without asking the engine, so also while it is busy or stands still."""
        ...

    @property
    def num_restarts(self) -> int: ...

    async def start(self) -> None:
        """Bind to the running event loop; call once before the first request."""
        ...

    async def submit(self, specs: Sequence[SubmitSpec]) -> RequestHandle:
        """Returns once the engine has admitted all of `specs`. Raises RequestError or EngineError."""
        ...

    def finish_sequence(self, request_id: str, index: int) -> None: ...

    async def stats(self) -> dict[str, Any]:
        """EngineStats by field name. Raises EngineError."""
        ...

    async def explain(self, request_ids: Sequence[str]) -> list[dict[str, Any] | None]:
        """What happened to live or recent requests (octavo.explain); None for unknown ones. Raises EngineError."""
        ...

    async def cache_report(self, tenant: str | None, limit: int) -> dict[str, Any]:
        """Engine.cache_report. Raises EngineError."""
        ...

    async def unpin(self, pin_id: str, tenant: str | None) -> bool: ...

    def fail_all(self, error: OctavoError) -> None:
        """End every request in flight with `error`."""
        ...

    async def close(self) -> None: ...


@dataclass
class _Waiting:
    """A command whose answer is still to come."""

    future: asyncio.Future[Any]
    handle: RequestHandle | None = None


@dataclass
class BaseEngineClient:
    """Books of requests and answers; subclasses carry the messages (`_send`) and call `deliver`."""

    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _handles: dict[str, RequestHandle] = field(default_factory=dict, init=False)
    _tickets: dict[int, _Waiting] = field(default_factory=dict, init=False)
    _last_ticket: int = field(default=0, init=False)
    _failure: OctavoError | None = field(default=None, init=False)
    on_failure: Callable[[OctavoError], None] | None = field(default=None, init=False)

    def _send(self, command: Command) -> None:
        raise EngineError("this client has no engine")  # pragma: no cover - subclasses send

    @property
    def healthy(self) -> bool:
        return self._failure is None

    @property
    def failure(self) -> OctavoError | None:
        return self._failure

    @property
    def state(self) -> str:
        return "running" if self._failure is None else "failed"

    @property
    def pulse(self) -> Pulse:
        return Pulse()

    @property
    def num_restarts(self) -> int:
        return 0

    @property
    def num_open(self) -> int:
        """Requests whose last event has not come yet."""
        return len(self._handles)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def submit(self, specs: Sequence[SubmitSpec]) -> RequestHandle:
        handle = RequestHandle([spec.request_id for spec in specs], self._release)
        for request_id in handle.request_ids:
            assert request_id not in self._handles
            self._handles[request_id] = handle
        try:
            await self._ask(lambda ticket: Submit(ticket, list(specs)), handle)
        except OctavoError:
            # Refused: the engine holds nothing of it.
            handle.open_ids.clear()
            handle.close()
            raise
        except BaseException:
            handle.close()
            raise
        return handle

    def finish_sequence(self, request_id: str, index: int) -> None:
        if self.healthy:
            self._send(FinishSequence(request_id, index))

    async def stats(self) -> dict[str, Any]:
        values: dict[str, Any] = await self._ask(GetStats)
        return values

    async def explain(self, request_ids: Sequence[str]) -> list[dict[str, Any] | None]:
        stories: list[dict[str, Any] | None] = await self._ask(lambda ticket: Explain(ticket, list(request_ids)))
        return stories

    async def cache_report(self, tenant: str | None, limit: int) -> dict[str, Any]:
        report: dict[str, Any] = await self._ask(lambda ticket: GetCache(ticket, tenant, limit))
        return report

    async def unpin(self, pin_id: str, tenant: str | None) -> bool:
        done: bool = await self._ask(lambda ticket: Unpin(ticket, pin_id, tenant))
        return done

    async def _ask(self, make: Callable[[int], Command], handle: RequestHandle | None = None) -> Any:
        if self._failure is not None:
            raise EngineError(str(self._failure))
        assert self._loop is not None, "call start() first"
        self._last_ticket += 1
        ticket = self._last_ticket
        waiting = _Waiting(self._loop.create_future(), handle)
        self._tickets[ticket] = waiting
        try:
            self._send(make(ticket))
            return await waiting.future
        finally:
            self._tickets.pop(ticket, None)

    def _release(self, handle: RequestHandle) -> None:
        for request_id in handle.request_ids:
            self._handles.pop(request_id, None)
        if handle.open_ids and self.healthy:
            self._send(Abort(sorted(handle.open_ids)))
        handle.open_ids.clear()

    def deliver(self, message: Message) -> None:
        """A message of the engine; on the event loop's thread."""
        if isinstance(message, Events):
            for event in message.events:
                handle = self._handles.get(event.request_id)
                if handle is not None:
                    handle.put(event)
        elif isinstance(message, Admitted):
            self._answer(message.ticket, None)
        elif isinstance(message, Refused):
            self._answer(message.ticket, from_wire(message.error))
        elif isinstance(message, Stats):
            self._answer(message.ticket, message.values)
        elif isinstance(message, Told):
            self._answer(message.ticket, message.value)
        elif isinstance(message, Explained):
            self._answer(message.ticket, message.stories)
        elif isinstance(message, Failed):
            self.fail(from_wire(message.error))

    def _answer(self, ticket: int, result: Any) -> None:
        waiting = self._tickets.pop(ticket, None)
        if waiting is None or waiting.future.done():
            return
        if isinstance(result, OctavoError):
            waiting.future.set_exception(result)
        else:
            waiting.future.set_result(result)

    def fail(self, error: OctavoError) -> None:
        """The engine is gone: nothing in flight will ever be answered by it."""
        if self._failure is None:
            self._failure = error
            self.fail_all(error)
            if self.on_failure is not None:
                self.on_failure(error)

    def fail_all(self, error: OctavoError) -> None:
        for waiting in list(self._tickets.values()):
            if not waiting.future.done():
                waiting.future.set_exception(error)
        for handle in set(self._handles.values()):
            handle.fail(error)


class _QueueInbox:
    """Commands from a queue in the same process."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def receive(self, *, block: bool) -> list[Command]:
        arrived = [self.queue.get()] if block else []
        with contextlib.suppress(queue.Empty):
            while True:
                arrived.append(self.queue.get_nowait())
        return [command for command in arrived if command is not None]

    def wake(self) -> None:
        self.queue.put(None)


class ThreadEngineClient(BaseEngineClient):
    """The engine in a thread of this process: for tests, and for embedding the server."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._inbox = _QueueInbox()
        self._engine_loop = EngineLoop(engine, self._inbox, self._emit)
        self._thread = threading.Thread(target=self._engine_loop.run, name="octavo-engine", daemon=True)

    async def start(self) -> None:
        await super().start()
        self._thread.start()

    def _send(self, command: Command) -> None:
        self._inbox.queue.put(command)

    def _emit(self, message: Message) -> None:
        """On the engine's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self.deliver, message)
        except RuntimeError:  # the event loop was closed: nobody listens any more
            self._inbox.queue.put(Shutdown())

    async def close(self) -> None:
        self.fail(EngineError("the server is shutting down"))
        self._inbox.queue.put(Shutdown())
        await asyncio.to_thread(self._thread.join, 10)
