"""uvicorn's HTTP protocol with two gaps closed: headers without end, and clients that leave while pipelining."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 64 * 1024
MAX_PIPELINED = 8


class OctavoProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = False
        self._num_header_bytes = 0
        self._cycles: list[RequestResponseCycle] = []

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._num_header_bytes = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
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
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
