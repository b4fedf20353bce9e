"""A few shared bytes in which the engine process says what it is doing, readable even while it hangs."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time

_LAYOUT = struct.Struct("=dq")  # when the present step began (time.monotonic, 0.0: in none), steps so far


class Heart:
    """One writer (the engine loop), one reader (its supervisor).

    The monotonic clock counts from the same moment in all processes of a machine. Both values are aligned and
    eight bytes wide, so a reader sees the old or the new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Makes the bytes, or shares those behind an inherited file `descriptor`."""
        if descriptor is None:
            with tempfile.TemporaryFile(prefix="octavo-") as file:
                file.truncate(_LAYOUT.size)
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _LAYOUT.size)
        self._num_steps = 0

    def begin_step(self) -> None:
        _LAYOUT.pack_into(self._map, 0, time.monotonic(), self._num_steps)

    def end_step(self) -> None:
        self._num_steps += 1
        _LAYOUT.pack_into(self._map, 0, 0.0, self._num_steps)

    @property
    def num_steps(self) -> int:
        return int(_LAYOUT.unpack_from(self._map)[1])

    def step_seconds(self) -> float:
        """How long the present step has been running; 0.0 between steps."""
        begun: float = _LAYOUT.unpack_from(self._map)[0]
        return time.monotonic() - begun if begun else 0.0

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)
