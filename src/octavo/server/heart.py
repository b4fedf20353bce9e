"""A few shared bytes in which the engine process says that it lives and what it does, readable even while it hangs."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from dataclasses import dataclass

_BUSY = struct.Struct("=d")  # since when the engine loop has been at work, 0.0: it waits for work
_BEAT = struct.Struct("=d")  # when the process last had the processor, whatever its loop does
_BEAT_AT = _BUSY.size

BEAT_SECONDS = 0.25
STALL_SECONDS = 1.0  # without a beat: the process is stopped, or gets no processor


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a front end can tell of an engine without asking it. Times in seconds.

    `step`: how long the present step has been running (0.0 between steps). `silent`: since the last beat.
    """

    step: float = 0.0
    silent: float = 0.0


class Heart:
    """One writer (the engine process), one reader (its supervisor).

    The monotonic clock counts from the same moment in all processes of a machine. All values are aligned and eight
    bytes wide, so a reader sees the old or the new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Makes the bytes, or shares those behind an inherited file `descriptor`."""
        if descriptor is None:
            with tempfile.TemporaryFile(prefix="octavo-") as file:
                file.truncate(_BUSY.size + _BEAT.size)
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _BUSY.size + _BEAT.size)

    def begin_step(self) -> None:
        """Also what the loop does between two steps belongs to one: it may hang there too."""
        _BUSY.pack_into(self._map, 0, time.monotonic())

    def end_step(self) -> None:
        _BUSY.pack_into(self._map, 0, 0.0)

    def start_beating(self) -> None:
        """In a thread of its own, so that a long step is told from a process that stands still."""

        def beat() -> None:
            while True:
                _BEAT.pack_into(self._map, _BEAT_AT, time.monotonic())
                time.sleep(BEAT_SECONDS)

        threading.Thread(target=beat, name="octavo-heart", daemon=True).start()

    def pulse(self) -> Pulse:
        (busy,), (beat,) = _BUSY.unpack_from(self._map), _BEAT.unpack_from(self._map, _BEAT_AT)
        now = time.monotonic()
        return Pulse(now - busy if busy else 0.0, now - beat if beat else 0.0)

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)
