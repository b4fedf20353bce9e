"""How much every table inside of an object holds: to see that nothing grows with the number of requests."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, enum.Enum)


def table_sizes(root: object, *, package: str = "octavo") -> dict[str, int]:
    """Entries of all containers that can be reached from `root` through attributes of the package's objects.

    By path, such as "Line.waiting" or "TokenIndex._children.*" (all values of that table together).
    """
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [(type(root).__name__, root)]
    while todo:
        path, found = todo.pop()
        if isinstance(found, _LEAVES) or callable(found) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, dict):
            sizes[path] += len(found)
            todo += [(f"{path}.*", value) for value in [*found, *found.values()]]
        elif isinstance(found, list | tuple | set | frozenset | deque):
            sizes[path] += len(found)
            todo += [(f"{path}.*", value) for value in found]
        elif any(base.__module__.partition(".")[0] == package for base in type(found).__mro__):
            todo += [(f"{type(found).__name__}.{name}", value) for name, value in _attributes(found)]
    return dict(sizes)


def _attributes(found: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(found, "__dict__", {}).items()
    for base in type(found).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(found, name):
                yield name, getattr(found, name)
