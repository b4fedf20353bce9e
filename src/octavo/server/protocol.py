"""uvicorn's HTTP protocol with two gaps closed: headers without end, and clients that leave while pipelining."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 64 * 1024
MAX_PIPELINED = 8
HEADER_TIMEOUT = 60.0  # seconds from the first moment of a connection or a request to the end of its headers


class OctavoProtocol(HttpToolsProtocol):
    """One connection. `write_timeout`: seconds in which a full buffer must at least begin to empty."""

    write_timeout = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = False
        self._num_header_bytes = 0
        self._cycles: list[RequestResponseCycle] = []
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def _await_headers(self) -> None:
        """A client that never ends its headers must not hold a connection for ever."""
        self._stop_timers()
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT, self.transport.close)

    def _stop_timers(self) -> None:
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._write_timer = None

    def pause_writing(self) -> None:
        """The send buffer is full. If it does not shrink in time, nobody reads: the connection ends."""
        super().pause_writing()
        self._watch_buffer(self.transport.get_write_buffer_size())

    def _watch_buffer(self, size: int) -> None:
        def check() -> None:
            now = self.transport.get_write_buffer_size()
            if now >= size:
                self.transport.abort()
            else:
                self._watch_buffer(now)

        self._write_timer = self.loop.call_later(self.write_timeout, check)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_headers()
        self._in_headers = True
        self._num_header_bytes = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._in_headers = False
        self._cycles = [c for c in self._cycles if not c.response_complete]
        self._cycles.append(self.cycle)
        # uvicorn stops reading once a second request waits, and so would not see the end of the connection.
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        """The parser keeps unfinished headers in memory, so their size needs a limit."""
        super().data_received(data)
        if self._in_headers:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._in_headers = False
                self.send_400_response("The request headers are too large.")

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells only the last request of a connection; those before it may still be running."""
        self._stop_timers()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
