"""The engine in a process of its own: how the front end starts it, talks to it, and notices its end."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from octavo.errors import ConfigError, EngineError
from octavo.server.heart import Heart
from octavo.server.wire import Command, Failed, Message, Opened, Progress, Ready, Shutdown, from_wire

DEFAULT_ASSEMBLE = "octavo.assemble:assemble"

LAUNCH = "launch"  # the file beside the sockets that says what to run: pickle of (assemble, model, options)
MAX_IPC_PATH = 80  # a Unix socket path holds about 100 bytes

StageProgress = Callable[[str, float], None]
_Loading = TypeVar("_Loading", Opened, Ready)


class EngineProcess:
    """One engine process, and the two one-way ipc sockets that carry messages to and from it.

    A socket pair is the life line: when either process ends, however it ends, the other reads its end.
    """

    def __init__(self, model: str, options: Any, *, assemble: str = DEFAULT_ASSEMBLE, log_format: str = "text") -> None:
        """Starts the process; `wait_ready` must follow. `assemble` is "module:function" to build the engine with."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Message).decode
        self._directory = _private_directory()
        self._context = zmq.Context()
        self._commands = self._bind(zmq.PUSH, "commands")
        self._events = self._bind(zmq.PULL, "events")
        self._reader: threading.Thread | None = None
        self._unread: deque[Message] = deque()  # while the model loads
        self._closing = False
        self._killing = threading.Lock()
        self.heart = Heart()
        # Not by a message: that would wait here until the process has begun to listen.
        (Path(self._directory) / LAUNCH).write_bytes(pickle.dumps((assemble, model, options)))
        self._lifeline, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self.heart.descriptor)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "octavo.server.engine_process", self._directory),
                    *(*map(str, descriptors), log_format),
                ],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        """Queues without a limit of their own: what may be in flight is bounded by admission."""
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.set_hwm(0)
        made.linger = 0
        made.bind(f"ipc://{self._directory}/{name}")
        return made

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_opened(self, progress: StageProgress | None = None) -> Opened:
        """Blocks until the model's files are read. Raises as wait_ready() does."""
        return self._wait_for(Opened, progress)

    def wait_ready(self, progress: StageProgress | None = None) -> Ready:
        """Blocks until the model is loaded. Raises what went wrong: ConfigError, ModelError, EngineError."""
        ready = self._wait_for(Ready, progress)
        # Both sides are connected; the names are needed no more.
        shutil.rmtree(self._directory, ignore_errors=True)
        return ready

    def _wait_for(self, kind: type[_Loading], progress: StageProgress | None) -> _Loading:
        try:
            while True:
                while self._unread:
                    message = self._unread.popleft()
                    if isinstance(message, kind):
                        return message
                    if isinstance(message, Progress) and progress is not None:
                        progress(message.stage, message.fraction)
                    elif isinstance(message, Failed):
                        raise from_wire(message.error)
                self._unread.extend(self._receive())
        except BaseException:
            self.kill()
            raise

    def _receive(self) -> list[Message]:
        """Waits; all messages that are there. Raises EngineError once the process has ended and all are read."""
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._lifeline, zmq.POLLIN)
        ready = dict(poller.poll())
        messages: list[Message] = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(self._decode(self._events.recv(zmq.NOBLOCK)))
        if not messages and self._lifeline.fileno() in ready:
            raise EngineError(f"the engine process ended unexpectedly ({self._exit_text()})")
        return messages

    def _exit_text(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "still exiting"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    def start_reader(self, on_messages: Callable[[list[Message]], None], on_end: Callable[[EngineError], None]) -> None:
        """From now on a thread calls `on_messages`, one hop per engine step; once, at the end, `on_end`.

        Either may raise RuntimeError: nobody listens any more.
        """

        def read() -> None:
            with contextlib.suppress(RuntimeError):
                while not self._closing:
                    try:
                        messages = self._receive()
                    except EngineError as e:
                        if not self._closing:
                            on_end(e)
                        return
                    on_messages(messages)

        self._reader = threading.Thread(target=read, name="octavo-events", daemon=True)
        self._reader.start()

    def send(self, command: Command) -> None:
        # Without a peer nothing can be sent; the reader thread is about to report its end.
        with contextlib.suppress(zmq.Again):
            self._commands.send(self._encode(command), zmq.NOBLOCK)

    def end(self, seconds: float) -> None:
        """Kindly, then not. Blocks."""
        self._closing = True
        self.send(Shutdown())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()

    def signal_kill(self) -> None:
        """Ends the process and nothing else; its life line tells whoever reads. From any thread."""
        if self._process.poll() is None:
            self._process.kill()

    def kill(self) -> None:
        """No process, thread, socket or file stays behind. Idempotent."""
        with self._killing:
            self._closing = True
            self.signal_kill()
            self._process.wait()
            if self._reader is not None and self._reader.is_alive():
                self._reader.join(5)
            if not self._context.closed:
                self._lifeline.close()
                self._context.destroy(linger=0)
                self.heart.close()
            shutil.rmtree(self._directory, ignore_errors=True)


def _private_directory() -> str:
    """For the ipc sockets; readable by this user only."""
    try:
        path = tempfile.mkdtemp(prefix="octavo-")
        if len(path) > MAX_IPC_PATH:
            os.rmdir(path)
            path = tempfile.mkdtemp(prefix="octavo-", dir="/tmp")
    except OSError as e:
        raise ConfigError(f"cannot make a temporary directory: {e.strerror}") from None
    return path
