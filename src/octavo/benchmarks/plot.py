"""Small SVG charts without a plotting library: distributions of latencies, and tokens over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from octavo.benchmarks.latency import percentile

PANEL_WIDTH, PANEL_HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 42
COLOR, GRID, INK = "#1f6f8b", "#dddddd", "#222222"
POINTS = 200


def _nice_step(span: float, num_ticks: int = 5) -> float:
    """1, 2 or 5 times a power of ten, so that about `num_ticks` of it make up the span."""
    step = 10.0 ** int(f"{span / num_ticks:e}".partition("e")[2])
    for factor in (1, 2, 5, 10):
        if step * factor * num_ticks >= span:
            return step * factor
    return step * 10


def _ticks(top: float) -> list[float]:
    step = _nice_step(top)
    return [i * step for i in range(int(top / step + 1e-9) + 1)]


def _panel(x0: int, y0: int, title: str, x_label: str, y_label: str, points: Sequence[tuple[float, float]]) -> str:
    """One chart with both axes from 0."""
    width, height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM
    x_top = max((x for x, _ in points), default=0.0) or 1.0
    y_top = (max((y for _, y in points), default=0.0) or 1.0) * 1.02

    def at(x: float, y: float) -> tuple[float, float]:
        return x0 + LEFT + x / x_top * width, y0 + TOP + height - y / y_top * height

    parts = [f'<text x="{x0 + LEFT}" y="{y0 + 20}" font-weight="bold">{escape(title)}</text>']
    for tick in _ticks(x_top):
        x, y = at(tick, 0)
        parts.append(f'<path d="M{x:.1f} {y:.1f}v{-height}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{tick:g}</text>')
    for tick in _ticks(y_top):
        x, y = at(0, tick)
        parts.append(f'<path d="M{x:.1f} {y:.1f}h{width}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    center, middle = x0 + LEFT + width / 2, y0 + TOP + height / 2
    parts.append(f'<text x="{center:.1f}" y="{y0 + PANEL_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate({x0 + 14} {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    if points:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOR}" stroke-width="1.8"/>')
    else:
        parts.append(f'<text x="{x0 + LEFT + 8}" y="{middle:.1f}">no data</text>')
    return "".join(parts)


def _distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, percent of values up to it), at evenly spaced percentiles."""
    ordered = sorted(values)
    return [(percentile(ordered, 100 * i / POINTS), 100 * i / POINTS) for i in range(POINTS + 1)] if ordered else []


def _rate(moments: Sequence[float], num_bins: int = 60) -> list[tuple[float, float]]:
    """(seconds, events per second) from moments in seconds."""
    if not moments:
        return []
    width = (max(moments) or 1.0) / num_bins
    counts = [0] * num_bins
    for moment in moments:
        counts[min(num_bins - 1, int(moment / width))] += 1
    return [((i + 0.5) * width, count / width) for i, count in enumerate(counts)]


def latency_plot(
    title: str, ttft_ms: Sequence[float], itl_ms: Sequence[float], e2e_ms: Sequence[float], moments: Sequence[float]
) -> str:
    """An SVG document: cumulative distributions of three latencies, and text chunks per second over the run."""
    share = "% of requests"
    panels = [
        ("Time to first token", "ms", share, _distribution(ttft_ms)),
        ("Inter-token latency", "ms", "% of gaps", _distribution(itl_ms)),
        ("End to end", "ms", share, _distribution(e2e_ms)),
        ("Text chunks per second", "s since the start", "chunks/s", _rate(moments)),
    ]
    width, height = 2 * PANEL_WIDTH, 2 * PANEL_HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="13">{escape(title)}</text>',
    ]
    for i, (name, x_label, y_label, points) in enumerate(panels):
        parts.append(_panel(i % 2 * PANEL_WIDTH, i // 2 * PANEL_HEIGHT + 28, name, x_label, y_label, points))
    return "\n".join([*parts, "</svg>\n"])
