"""Signals as flags that are looked at between steps, so that they never strike in the middle of book-keeping."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Interrupt:
    """`requested` turns true when the signal comes; whoever deals with it may turn it back."""

    requested: bool = False


@contextmanager
def catch_interrupt(number: int = signal.SIGINT) -> Iterator[Interrupt]:
    """Within, this signal (Ctrl-C) only sets the flag. Outside the main thread Python allows no handlers: no effect."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def note(signum: int, frame: FrameType | None) -> None:
        interrupt.requested = True

    before = signal.signal(number, note)
    try:
        yield interrupt
    finally:
        signal.signal(number, before)
