"""From the outcomes of a load test to figures: TTFT, ITL, TPOT, E2E, throughput, goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from octavo.benchmarks.load import Outcome

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps, in milliseconds: time to first token, and the p99 of its own inter-token times."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one request, in seconds. `ttft` is None where no text came, `tpot` where fewer than two tokens did."""

    ttft: float | None
    tpot: float | None
    e2e: float
    itl: tuple[float, ...]


def latencies_of(outcome: Outcome, *, from_due: bool) -> Latencies:
    """`from_due`: count from when the request should have gone out, so that a queue before the server shows."""
    start = outcome.due if from_due else outcome.sent
    texts = outcome.texts
    tpot = None
    if texts and outcome.num_output > 1:
        tpot = (texts[-1] - texts[0]) / (outcome.num_output - 1)
    return Latencies(
        ttft=texts[0] - start if texts else None,
        tpot=tpot,
        e2e=outcome.ended - start,
        itl=tuple(b - a for a, b in pairwise(texts)),
    )


def percentile(ordered: Sequence[float], q: float) -> float:
    """Of sorted values, by linear interpolation between the two nearest ranks (numpy's default)."""
    assert ordered and 0 <= q <= 100
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def keeps(latencies: Latencies, slo: Slo) -> bool:
    if slo.ttft_ms is not None and (latencies.ttft is None or latencies.ttft * 1e3 > slo.ttft_ms):
        return False
    return slo.itl_ms is None or not latencies.itl or percentile(sorted(latencies.itl), 99) * 1e3 <= slo.itl_ms


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    spread = {"mean": round(sum(ordered) / len(ordered) * 1e3, 3)}
    spread.update({f"p{q}": round(percentile(ordered, q) * 1e3, 3) for q in PERCENTILES})
    return spread


def figures_of(outcomes: Sequence[Outcome], start: float, slo: Slo, *, from_due: bool) -> dict[str, Any]:
    """All figures of a run. Only requests that succeeded count; the time runs until the last of all ended."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max(outcome.ended for outcome in outcomes) - start
    each = [latencies_of(outcome, from_due=from_due) for outcome in good]
    num_input, num_output = sum(o.num_input for o in good), sum(o.num_output for o in good)
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    figures: dict[str, Any] = {
        "num_requests": len(outcomes),
        "num_failed": len(outcomes) - len(good),
        "errors": errors,
        "total_s": round(seconds, 3),
        "num_input_tokens": num_input,
        "num_output_tokens": num_output,
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "total_tokens_per_s": round((num_input + num_output) / seconds, 1),
        "ttft_ms": _spread([x.ttft for x in each if x.ttft is not None]),
        "itl_ms": _spread([gap for x in each for gap in x.itl]),
        "tpot_ms": _spread([x.tpot for x in each if x.tpot is not None]),
        "e2e_ms": _spread([x.e2e for x in each]),
    }
    if slo.is_set:
        num_kept = sum(keeps(x, slo) for x in each)
        figures["slo"] = {"ttft_ms": slo.ttft_ms, "itl_ms": slo.itl_ms}
        figures["goodput_requests_per_s"] = round(num_kept / seconds, 3)
        figures["share_within_slo"] = round(num_kept / len(outcomes), 4)
    return figures
