"""uvicorn with our way to stop: drain, then end with a terminal error, then at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from octavo.errors import ConfigError, EngineError
from octavo.interrupt import Interrupt
from octavo.server.keys import KeyRing
from octavo.server.listen import cannot_listen
from octavo.server.protocol import OctavoProtocol
from octavo.server.state import ServerState

keys_logger = logging.getLogger("octavo.keys")


class OctavoServer(uvicorn.Server):
    """uvicorn with our way to stop.

    First signal: new requests get 503, those in flight may end within `shutdown_timeout` seconds, the
    rest get a terminal error. Second signal: at once. If the engine is gone for good, the server stops
    with `failure` set.
    """

    def __init__(
        self,
        app: Starlette,
        *,
        shutdown_timeout: float = 5.0,
        write_timeout: float = 60.0,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
        on_started: Callable[[], None] = lambda: None,
        hangup: Interrupt | None = None,
        read_keys: Callable[[], KeyRing | None] = lambda: None,
    ) -> None:
        """Whenever `hangup` is set, the keys are read again; they stay as they are if that fails."""
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            timeout_graceful_shutdown=2,  # for clients that do not read their last frames
            proxy_headers=False,
            http=type("Protocol", (OctavoProtocol,), {"write_timeout": write_timeout}),
            timeout_keep_alive=60,  # longer than clients keep idle connections, so that they close first
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
        )
        super().__init__(config)
        self._state: ServerState = app.state.server
        self._shutdown_timeout = shutdown_timeout
        self._on_started = on_started
        self._hangup = hangup or Interrupt()
        self._read_keys = read_keys
        self._num_signals = 0
        self._deadline: float | None = None
        self.failure: EngineError | None = None

    def serve_on(self, listener: socket.socket) -> None:
        """Blocks until the server has stopped. Raises ConfigError if the port was taken in the meantime."""
        self.run(sockets=[listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as e:
            host, port = (sockets or [])[0].getsockname()[:2]
            await self.lifespan.shutdown()
            raise cannot_listen(host, port, e) from None
        self._on_started()

    def stop(self) -> None:
        """What a signal does; may be called from any thread."""
        self._num_signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Every 0.1 s: is it time to leave the main loop?"""
        client = self._state.client
        if not client.healthy:
            self.failure = EngineError(str(client.failure))
            return True
        if self._num_signals and self._deadline is None:
            self._state.draining = True
            self._deadline = time.monotonic() + self._shutdown_timeout
        if self._num_signals > 1:
            self.force_exit = True
            return True
        if self._deadline is not None and self._state.num_in_flight == 0:
            return True
        if self._deadline is not None and time.monotonic() >= self._deadline:
            client.fail_all(EngineError("the server is shutting down"))
            return True
        if self._hangup.requested:
            self._hangup.requested = False
            await self._reload_keys()
        return await super().on_tick(counter)

    async def _reload_keys(self) -> None:
        accounts = self._state.accounts
        try:
            ring = await asyncio.to_thread(self._read_keys)
        except ConfigError as e:
            keys_logger.warning("%s; the keys stay as they were", e)
            return
        if ring is not None and accounts is not None:
            accounts.use(ring)
            keys_logger.info("the key file was read again; keys: %d", len(ring.keys))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # cancelled tasks are meant to be
        await asyncio.sleep(0)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a handled signal is not raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()
