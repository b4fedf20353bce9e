"""Two- and three-column tables on stdout, plain enough for grep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click


def print_rows(rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Columns aligned to their widest cell, under an optional title."""
    table = [tuple(row) for row in rows]
    if title is not None:
        click.echo(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    indent = "" if title is None else "  "
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo(indent + "  ".join(cells).rstrip())
