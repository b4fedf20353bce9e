"""What runs in the engine process: build the engine, then the engine loop until told to stop."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo import logs
from octavo.collector import collector_paused, resume_collector
from octavo.errors import EngineError, OctavoError
from octavo.server.heart import Heart
from octavo.server.loop import EngineLoop
from octavo.server.process import LAUNCH
from octavo.server.wire import Command, Failed, Message, Opened, Progress, Ready, to_wire

logger = logging.getLogger(__name__)


class _ZmqInbox:
    """Commands of the front end."""

    def __init__(self, commands: zmq.Socket[bytes]) -> None:
        self._commands = commands
        self._decode = msgspec.msgpack.Decoder(Command).decode
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(commands, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    def receive(self, *, block: bool) -> list[Command]:
        if block:
            self._poller.poll()
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        commands: list[Command] = []
        with contextlib.suppress(zmq.Again):
            while True:
                commands.append(self._decode(self._commands.recv(zmq.NOBLOCK)))
        return commands

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake up
            self._waker.send(b"w")


def main(directory: str, lifeline: socket.socket, heart: Heart, log_format: str) -> int:
    """Exit code: 0 after Shutdown, 1 after a failure (which has been sent as Failed)."""
    # The front end decides when to stop, also when Ctrl-C, a terminal or a service manager signals the whole group.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    heart.start_beating()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logs.use(log_format, "engine")
    context = zmq.Context()
    commands, events = (
        _connect(context, *what) for what in ((zmq.PULL, directory, "commands"), (zmq.PUSH, directory, "events"))
    )
    encode = msgspec.msgpack.Encoder().encode
    failed = False

    def emit(message: Message) -> None:
        nonlocal failed
        failed = failed or isinstance(message, Failed)
        events.send(encode(message))

    with collector_paused():
        assembly = _assemble((Path(directory) / LAUNCH).read_bytes(), emit)
    if assembly is not None:
        resume_collector()
        _prepare_grammars(assembly.engine.grammars)
        EngineLoop(assembly.engine, _ZmqInbox(commands), emit, heart).run()
        assembly.close()
    context.destroy(linger=1000)
    return 1 if failed else 0


def _prepare_grammars(grammars: Any) -> None:
    """Some tenths of a second now rather than when the first grammar comes, and beside the loop."""

    def prepare() -> None:
        with contextlib.suppress(OctavoError):  # of the tokenizer: the front end, which has the same, says so
            grammars.prepare()

    if grammars is not None:
        threading.Thread(target=prepare, name="octavo-prepare").start()  # no daemon: at the end it is waited for


def _connect(context: zmq.Context[Any], kind: int, directory: str, name: str) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = context.socket(kind)
    made.set_hwm(0)
    made.connect(f"ipc://{directory}/{name}")
    return made


def _end_with_parent(lifeline: socket.socket) -> None:
    """The front end's end of the life line closes when it ends, also when it is killed."""
    lifeline.recv(1)
    os._exit(1)


def _assemble(launch: bytes, emit: Callable[[Message], None]) -> Any:
    """The Assembly, announced as Ready; or None, announced as Failed."""
    shown: dict[str, int] = {}

    def progress(stage: str, fraction: float) -> None:
        percent = int(fraction * 100)
        if shown.get(stage) != percent:
            shown[stage] = percent
            emit(Progress(stage, fraction))

    def opened(model: Any) -> None:
        emit(Opened(pickle.dumps(model.tokenizer_source)))

    try:
        assemble, model, options = pickle.loads(launch)
        module, _, function = assemble.partition(":")
        build = getattr(importlib.import_module(module), function)
        assembly = build(model, options, progress=progress, opened=opened)
        emit(_ready(assembly))
    except OctavoError as e:
        emit(Failed(to_wire(e)))
    except MemoryError:
        emit(Failed(to_wire(EngineError("not enough memory to load the model"))))
    except Exception as e:
        logger.exception("the engine could not start")
        emit(Failed(to_wire(EngineError(f"the engine could not start: {type(e).__name__}: {str(e)[:300]}"))))
    else:
        return assembly
    return None


def _ready(assembly: Any) -> Ready:
    model = assembly.model
    return Ready(
        model_name=model.name,
        max_model_len=assembly.config.max_model_len,
        kv_cache_bytes=assembly.config.num_blocks * assembly.engine.backend.capabilities.kv_bytes_per_block,
        vocab_size=assembly.engine.backend.capabilities.vocab_size,
        report=list(assembly.report),
        generation_config={k: v for k, v in model.generation_config.items() if isinstance(v, int | float | bool)},
        chat_template=assembly.chat_template,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), Heart(int(sys.argv[3])), sys.argv[4]))
