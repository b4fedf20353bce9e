"""Progress of long work: a stage and the fraction of it that is done; and bars for it on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

Progress = Callable[[str, float], None]
"""Called with a stage, such as "Downloading …", and the fraction of it that is done, from 0 to 1."""


def by_fraction(progress: Progress | None) -> Callable[[str, int, int | None], None] | None:
    """The same for those who count (stage, done, total or None): see octavo.weights.files.Progress."""
    if progress is None:
        return None
    report = progress
    return lambda stage, done, total: report(stage, done / total if total else 0.0)


class StageProgress:
    """A Progress that shows one bar per stage on stderr while it is open; silent where that is no terminal."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __call__(self, stage: str, fraction: float) -> None:
        if self._bars is None:
            self._bars = _start_bars()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=1.0)
        self._bars.update(self._tasks[stage], completed=fraction)

    def close(self) -> None:
        """Takes the bars off the screen; idempotent."""
        if self._bars is not None:
            self._bars.stop()


def _start_bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bars = Bars(*columns, console=console, disable=not console.is_terminal, transient=True)
    bars.start()
    return bars
