"""Times every op of a model on its own, and sets it against what the machine can do at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo.plan import PlanRow, SampleSpec, StepPlan
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo.backends.cpu.sites import Site, SiteProgram
    from octavo.models.loading import LoadedModel
    from octavo.models.spec import ModelSpec

BLOCK_SIZE = 16
MIN_STEPS = 3
# The arithmetic that the matrix products of an instruction set use: which limit they are measured by.
ARITHMETIC = {
    "avx2": "dot_int8",
    "avx512_bf16": "dot_bf16",
    "avx512_vnni": "dot_int8",
    "avx512_vnni_bf16": "dot_int8",
    "amx": "amx_bf16",
}
EXACT_FORMATS = ("F32", "F16")  # multiplied in float32 everywhere
UNITS = {
    "dram_read": "GB/s",
    "cache_read": "GB/s",
    "fma_f32": "GFLOP/s",
    "dot_bf16": "GFLOP/s",
    "dot_int8": "GOP/s",
    "amx_bf16": "GFLOP/s",
    "amx_int8": "GOP/s",
}


@dataclass(frozen=True, slots=True)
class Work:
    """One step: `rows` sequences with one token each, `context` tokens known before it; or one sequence's prompt."""

    name: str
    num_tokens: int
    context: int
    is_prefill: bool

    @property
    def blocks_per_row(self) -> int:
        length = self.num_tokens if self.is_prefill else self.context + 1
        return -(-length // BLOCK_SIZE)

    @property
    def num_rows(self) -> int:
        return 1 if self.is_prefill else self.num_tokens

    @property
    def num_blocks(self) -> int:
        return self.num_rows * self.blocks_per_row

    @property
    def seen(self) -> int:
        """Positions attended to, over all tokens."""
        n = self.num_tokens
        return n * (n + 1) // 2 if self.is_prefill else n * (self.context + 1)

    def plan(self, num_samples: int) -> StepPlan:
        """Every sequence has blocks of its own; the first `num_samples` of them want a greedy token."""
        tokens, start = (self.num_tokens, 0) if self.is_prefill else (1, self.context)
        params = SamplingParams(temperature=0.0)
        each, rows = self.blocks_per_row, []
        for i in range(self.num_rows):
            known = [0] * (start + tokens)
            sample = SampleSpec(params, 0, 0, len(known), known, len(known)) if i < num_samples else None
            rows.append(PlanRow([0] * tokens, start, list(range(i * each, (i + 1) * each)), sample))
        return StepPlan(tuple(rows))


def works(decode_rows: Sequence[int], prefill: int, context: int) -> list[Work]:
    """Decoding `decode_rows` sequences together, and a prompt of `prefill` tokens."""
    found = [Work(f"decode {rows}", rows, context, is_prefill=False) for rows in decode_rows]
    return [*found, Work(f"prefill {prefill}", prefill, 0, is_prefill=True)] if prefill else found


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one op at one site. `flops` and `num_bytes` are what the op needs at least; `arithmetic` names its limit.

    `dram_read`: bytes a second that reading memory gave just before and after, on average.
    """

    work: Work
    site: Site
    seconds: float
    flops: float
    num_bytes: float
    arithmetic: str
    dram_read: float


def cost(site: Site, spec: ModelSpec, work: Work, weight_bytes: int) -> tuple[float, float]:
    """(operations, bytes) that one op needs at least: weights and KV read once, activations in float32."""
    widths, rows = site.widths, work.num_tokens if site.label != "head" else work.num_rows
    if site.method == "gated_linear":
        flops = 4.0 * rows * widths[0] * widths[-1] + 5.0 * rows * widths[-1]
        return flops, weight_bytes + 4.0 * rows * (widths[0] + widths[-1])
    if site.method == "linear":
        return 2.0 * rows * widths[0] * widths[-1], weight_bytes + 4.0 * rows * (widths[0] + widths[-1])
    if site.method == "attention":
        kv_rows = work.num_tokens if work.is_prefill else work.seen
        kv_bytes = 2.0 * kv_rows * spec.num_kv_heads * spec.head_dim * 2
        return 4.0 * widths[0] * work.seen, kv_bytes + 4.0 * rows * 2 * widths[0]
    if site.method == "sample":
        return float(work.num_rows * widths[0]), 4.0 * work.num_rows * widths[0]
    flops_per_value = 3.0 if site.method == "rope" else 4.0
    moved = sum(widths) + (widths[0] if site.method in ("add_rms_norm", "rope", "head_norm") else 0)
    return flops_per_value * rows * widths[0], 4.0 * rows * moved


def arithmetic_of(site: Site, isa: str) -> str:
    if site.method in ("linear", "gated_linear") and site.weight_format not in EXACT_FORMATS:
        if site.weight_format == "BF16" and ARITHMETIC.get(isa) == "dot_int8":
            return "dot_bf16" if isa == "avx512_vnni_bf16" else "fma_f32"
        return ARITHMETIC.get(isa, "fma_f32")
    return "fma_f32"


def time_site(program: SiteProgram, work: Work, seconds: float) -> float:
    """Median over several steps of the seconds that one op takes."""
    program.fill_kv()
    site = program.site
    plan = work.plan(work.num_rows if site.label in ("head", "sample") else 0)
    program.run(plan)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < MIN_STEPS or time.perf_counter() < end:
        taken.append(program.run(plan))
    return median(taken) / site.num_ops


def time_kernels(
    model: LoadedModel,
    all_work: Sequence[Work],
    *,
    isa: str,
    threads: int,
    seconds: float,
    read_dram: Callable[[], float],
    progress: Callable[[str, float], None],
) -> Iterator[Timing]:
    """Every site of the model with every work, for about `seconds` each, between two calls of `read_dram`."""
    from octavo.backends.cpu.sites import site_program, sites_of

    sites = sites_of(model)
    for i, site in enumerate(sites):
        program = site_program(
            model,
            site,
            isa=isa,
            threads=threads,
            max_tokens=max(work.num_tokens for work in all_work),
            num_blocks=max(work.num_blocks for work in all_work),
            max_len=max(work.blocks_per_row for work in all_work) * BLOCK_SIZE,
        )
        for work in all_work:
            progress("Timing kernels", i / len(sites))
            before = read_dram()
            taken = time_site(program, work, seconds)
            dram_read = (before + read_dram()) / 2
            flops, num_bytes = cost(site, model.spec, work, program.weight_bytes)
            yield Timing(work, site, taken, flops, num_bytes, arithmetic_of(site, program.program.isa), dram_read)


def figures_of(timing: Timing, limits: dict[str, float]) -> dict[str, Any]:
    """One line of the result: times in microseconds, rates in 1e9 per second, shares of the limits."""
    rate, bandwidth = timing.flops / timing.seconds, timing.num_bytes / timing.seconds
    return {
        "work": timing.work.name,
        "op": timing.site.method,
        "site": timing.site.label,
        "shape": timing.site.shape,
        "format": timing.site.weight_format,
        "num_ops": timing.site.num_ops,
        "us": round(timing.seconds * 1e6, 2),
        "step_us": round(timing.seconds * 1e6 * timing.site.num_ops, 1),
        "gflop_per_s": round(rate / 1e9, 2),
        "gb_per_s": round(bandwidth / 1e9, 2),
        "dram_read_gb_per_s": round(timing.dram_read / 1e9, 2),
        "share_of_dram": round(bandwidth / timing.dram_read, 4),
        "share_of_arithmetic": round(rate / limits[timing.arithmetic], 4),
        "arithmetic": timing.arithmetic,
    }
