"""Ctrl-C as a flag between steps, so that it never strikes in the middle of the engine's book-keeping."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Interrupt:
    """`requested` turns true at the first Ctrl-C."""

    requested: bool = False


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Within, SIGINT only sets the flag. Outside the main thread Python allows no handlers: nothing changes."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def note(signum: int, frame: FrameType | None) -> None:
        interrupt.requested = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
