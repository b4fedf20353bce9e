"""What the machine can do at most, measured by a small native loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.system import memory_info

if TYPE_CHECKING:
    from octavo._native import MemoryReader

MOST_BYTES = 1 << 30
LEAST_BYTES = 64 << 20


def dram_bytes(threads: int) -> int:
    """How much memory to read for its bandwidth: 1 GiB, or a quarter of what is free, but 4 MiB a thread at least."""
    return max(threads * (4 << 20), LEAST_BYTES, min(MOST_BYTES, memory_info().available // 4))


def measure_limits(isa: str, threads: int, seconds: float) -> dict[str, float]:
    """Rates per second by name (see csrc/bench.h): bytes read, and operations of each kind of arithmetic.

    `isa` "auto" is the best of this CPU. Takes about `seconds` for each rate, and up to 1 GiB of memory.
    """
    from octavo import _native

    limits: dict[str, float] = _native.measure_limits(_chosen(isa), threads, seconds, dram_bytes(threads))
    return limits


def memory_reader(isa: str, threads: int) -> MemoryReader:
    """Measures again and again what reading memory gives; holds up to 1 GiB."""
    from octavo import _native

    return _native.MemoryReader(_chosen(isa), threads, dram_bytes(threads))


def _chosen(isa: str) -> str:
    from octavo import _native

    return _native.available_isas()[-1] if isa == "auto" else isa
