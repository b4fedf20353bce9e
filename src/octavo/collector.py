"""Python's collector of reference cycles in the processes of `octavo serve`: off while one starts, and from then on
blind to what it started with.

Modules, classes and the vocabulary are tens of thousands of objects that live as long as their process. Looking through
them is what a full collection takes its time for: 43 ms in the front end and 28 ms in the engine process (Zen 3), in
which no token goes out.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within, nothing is collected, up to resume_collector()."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resume_collector() -> None:
    """The process has started: what there is by now is never looked through again."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else native objects that cycles hold would not be freed, and nanobind complain
