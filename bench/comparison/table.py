"""From single runs to one table: medians, ranges, and Octavo's ratio to the best peer."""

from __future__ import annotations

from statistics import median
from typing import Any

OURS = ("octavo", "octavo-avx2")


def speeds(runs: list[dict[str, Any]], engine: str, size: str) -> list[float]:
    """Tokens per second of each repeat, in order of the repeats."""
    mine = [run for run in runs if run["engine"] == engine and run["size"] == size]
    return [run["tokens_per_s"] for run in sorted(mine, key=lambda run: run["repeat"])]


def is_octavo(engine: str) -> bool:
    return engine.partition(":")[0] in OURS


def best(runs: list[dict[str, Any]], engines: list[str], size: str) -> str | None:
    """The engine with the highest median."""
    measured = [engine for engine in engines if speeds(runs, engine, size)]
    return max(measured, key=lambda engine: median(speeds(runs, engine, size)), default=None)


def ratio(runs: list[dict[str, Any]], ours: str, theirs: str, size: str) -> float | None:
    """Median over the repeats of ours / theirs: both sides of a repeat ran one after the other."""
    pairs = zip(speeds(runs, ours, size), speeds(runs, theirs, size), strict=False)
    ratios = [a / b for a, b in pairs]
    return median(ratios) if ratios else None


def summarise(runs: list[dict[str, Any]], engines: list[str], sizes: list[str]) -> dict[str, Any]:
    """Medians and ranges per engine and size; per size the best peer and the ratio of each Octavo to it."""
    table: dict[str, Any] = {}
    for engine in engines:
        table[engine] = {}
        for size in sizes:
            values = speeds(runs, engine, size)
            if values:
                table[engine][size] = {
                    "median": round(median(values), 1),
                    "min": round(min(values), 1),
                    "max": round(max(values), 1),
                    "repeats": len(values),
                }
    peers = [engine for engine in engines if not is_octavo(engine)]
    ratios: dict[str, Any] = {}
    for size in sizes:
        peer = best(runs, peers, size)
        if peer is not None:
            found = {e: ratio(runs, e, peer, size) for e in engines if is_octavo(e)}
            ratios[size] = {"best_peer": peer, **{e: round(r, 3) for e, r in found.items() if r is not None}}
    return {"tokens_per_s": table, "ratio_to_best_peer": ratios}


def markdown(summary: dict[str, Any], engines: list[str], sizes: list[str], loads: dict[str, float]) -> str:
    """The table of medians, then the ratios."""
    lines = ["| engine, weights | " + " | ".join(sizes) + " | ready after |", "|---" * (len(sizes) + 2) + "|"]
    for engine in engines:
        cells = [summary["tokens_per_s"].get(engine, {}).get(size) for size in sizes]
        shown = ["-" if cell is None else f"{cell['median']:,.0f}" for cell in cells]
        load = f"{loads[engine]:.1f} s" if engine in loads else "-"
        lines.append(f"| {engine.replace(':', ', ', 1)} | {' | '.join(shown)} | {load} |")
    ratios = summary["ratio_to_best_peer"]
    for engine in engines:
        if is_octavo(engine):
            cells = [ratios.get(size, {}).get(engine) for size in sizes]
            shown = ["-" if cell is None else f"{cell:.2f}x" for cell in cells]
            lines.append(f"| {engine.replace(':', ', ', 1)}: ratio to the best peer | {' | '.join(shown)} | |")
    if ratios:
        names = [ratios[size]["best_peer"].replace(":", " ") if size in ratios else "-" for size in sizes]
        lines.append(f"| best peer | {' | '.join(names)} | |")
    return "\n".join(lines)
