"""What the machine can do at most, measured by a small native loop."""

from __future__ import annotations

from octavo.system import memory_info

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

    chosen = _native.available_isas()[-1] if isa == "auto" else isa
    limits: dict[str, float] = _native.measure_limits(chosen, threads, seconds, dram_bytes(threads))
    return limits
