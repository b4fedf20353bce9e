"""Progress bars for long work: downloads, loading, benchmarks. Silent where stderr is no terminal."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from octavo.kv.sizing import format_bytes


class StageProgress:
    """Called with (description, done, total or None); one bar per description. See octavo.weights.files.Progress.

    Amounts from a mebibyte up are taken for bytes.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def __call__(self, description: str, done: int, total: int | None) -> None:
        if description not in self._tasks:
            self._tasks[description] = self._progress.add_task(description, amount="")
        self._progress.update(self._tasks[description], completed=done, total=total, amount=_amount(done, total))


def _amount(done: int, total: int | None) -> str:
    write = format_bytes if (total or done) >= 1 << 20 else "{:,}".format
    return write(done) if total is None else f"{write(done)} of {write(total)}"
