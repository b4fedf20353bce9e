"""`octavo bench`: its commands, of which `offline` is here: how fast this machine generates from random prompts."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.bench_fairness import fairness
from octavo.cli.bench_kernels import bench_kernels
from octavo.cli.bench_serve import bench_serve
from octavo.cli.options import DEFAULT_MODEL, GroupedCommand, engine_options, option, take_engine_options
from octavo.cli.tables import print_rows
from octavo.errors import ConfigError, EngineError
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo.assemble import Assembly
    from octavo.engine import Engine

WORK = "Work"
WARMUP_TOKENS = 8
LIMIT_SECONDS = 0.3


@click.group()
def bench() -> None:
    """Measure speed."""


bench.add_command(bench_serve, "serve")
bench.add_command(fairness)
bench.add_command(bench_kernels, "kernels")


@dataclass(frozen=True, slots=True)
class Workload:
    """What to run: `num_prompts` sequences at once, each `input_len` prompt and `output_len` generated tokens."""

    num_prompts: int
    input_len: int
    output_len: int
    temperature: float
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        rng = random.Random(self.seed)
        return [[rng.randrange(vocab_size) for _ in range(self.input_len)] for _ in range(self.num_prompts)]

    def params(self, number: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.output_len, ignore_eos=True, seed=self.seed + number
        )


@dataclass(slots=True)
class Measured:
    """Times in seconds. `first_phase` lasts until every sequence has its first token; None if they did not all
    run at once, so that there is no such phase. `num_decoded` tokens came after it, in `num_decode_steps` steps."""

    total: float
    num_steps: int
    first_phase: float | None
    num_decoded: int
    num_decode_steps: int
    output_ids: list[list[int]]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all output ids, as little-endian uint32, each sequence led by its length."""
        digest = hashlib.sha256()
        for ids in self.output_ids:
            digest.update(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids))
        return digest.hexdigest()


def measure(engine: Engine, workload: Workload, vocab_size: int, tick: Callable[[int], None] | None = None) -> Measured:
    """Runs the workload on the bare engine (token ids in, token ids out); `tick` hears of each step's tokens."""
    requests = [
        engine.make_request(f"bench-{number}", ids, workload.params(number))
        for number, ids in enumerate(workload.prompts(vocab_size))
    ]
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    missing_first, first_phase, num_in_first, num_steps, steps_in_first = set(outputs), None, 0, 0, 0
    start = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished:
        num_new = 0
        for event in engine.step():
            if event.error is not None:
                raise EngineError(f"the benchmark's request {event.request_id} failed: {event.error}")
            outputs[event.request_id].extend(event.token_ids)
            num_new += len(event.token_ids)
            if event.token_ids:
                missing_first.discard(event.request_id)
        num_steps += 1
        if first_phase is None:
            num_in_first += num_new
            if not missing_first:
                first_phase, steps_in_first = time.perf_counter() - start, num_steps
        if tick is not None:
            tick(num_new)
    total = time.perf_counter() - start
    ids = list(outputs.values())
    return Measured(total, num_steps, first_phase, sum(map(len, ids)) - num_in_first, num_steps - steps_in_first, ids)


@bench.command(cls=GroupedCommand)
@click.argument("model", default=DEFAULT_MODEL)
@option("--num-prompts", type=click.IntRange(1, 100_000), default=64, group=WORK, help="Sequences.")
@option("--input-len", type=click.IntRange(1), default=128, group=WORK, help="Prompt tokens each.")
@option("--output-len", type=click.IntRange(1), default=128, group=WORK, help="Output tokens each.")
@option("--temperature", type=float, default=0.0, group=WORK, help="0 is greedy.")
@option("--warmup", type=click.IntRange(0), default=4, group=WORK, help="Sequences run before.")
@option("--json", "as_json", is_flag=True, group=WORK, help="Print one JSON object instead of a table.")
@engine_options
def offline(model: str, warmup: int, as_json: bool, **values: Any) -> None:
    """Generate from random prompts without a server: tokens/s, memory, and a fingerprint of the output.

    Prompts are random token ids from a fixed seed, EOS is ignored, nothing is turned into text.
    """
    from octavo.assemble import assemble
    from octavo.progress import StageProgress

    options = take_engine_options(values)
    workload = Workload(**values, seed=options.seed or 0)
    SamplingParams(temperature=workload.temperature)
    with StageProgress() as progress:
        start = time.perf_counter()
        assembly = assemble(model, options, progress=progress)
        load_seconds = time.perf_counter() - start
    _check_room(assembly, workload)
    vocab_size = assembly.backend.capabilities.vocab_size
    with StageProgress() as progress:
        if warmup:
            small = Workload(
                warmup, workload.input_len, min(WARMUP_TOKENS, workload.output_len), 0.0, workload.seed + 1
            )
            measure(assembly.engine, small, vocab_size)
        done = 0

        def tick(num_new: int) -> None:
            nonlocal done
            done += num_new
            progress("Generating", done / (workload.num_prompts * workload.output_len))

        measured = measure(assembly.engine, workload, vocab_size, tick)
    figures = _figures(assembly, workload, measured, load_seconds)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(figures)
    assembly.close()


def _check_room(assembly: Assembly, workload: Workload) -> None:
    needed, room = workload.input_len + workload.output_len, assembly.config.max_model_len
    if needed > room:
        raise ConfigError(f"input-len + output-len = {needed} tokens is more than max_model_len {room}")
    if workload.num_prompts > assembly.config.max_num_waiting:
        raise ConfigError(
            f"num-prompts {workload.num_prompts} is more than max_num_waiting {assembly.config.max_num_waiting}"
        )


def _figures(assembly: Assembly, workload: Workload, measured: Measured, load_seconds: float) -> dict[str, Any]:
    from octavo.system import cpu_model, peak_rss

    num_input, num_output = workload.num_prompts * workload.input_len, sum(map(len, measured.output_ids))
    capabilities, config, stats = assembly.backend.capabilities, assembly.config, assembly.engine.stats()
    figures: dict[str, Any] = {
        "model": assembly.model.name,
        "workload": asdict(workload),
        "load_s": round(load_seconds, 3),
        "total_s": round(measured.total, 3),
        "num_output_tokens": num_output,
        "output_tokens_per_s": round(num_output / measured.total, 1),
        "total_tokens_per_s": round((num_input + num_output) / measured.total, 1),
        "num_steps": measured.num_steps,
        "num_preemptions": stats.num_preemptions,
        "peak_rss_bytes": peak_rss(),
        "weight_bytes": capabilities.weight_bytes,
        "kv_bytes_per_token": capabilities.kv_bytes_per_block // config.block_size,
        "output_sha256": measured.fingerprint,
        "cpu": cpu_model(),
        "config": {setting.name: setting.value for setting in assembly.settings},
        "kernels": capabilities.details,
    }
    # Only where all sequences run at once is there a time before which everything is prefill.
    if measured.first_phase is not None and workload.num_prompts <= config.max_num_seqs:
        decode = measured.total - measured.first_phase
        figures["prefill_tokens_per_s"] = round(num_input / measured.first_phase, 1)
        figures["prefill_s"] = round(measured.first_phase, 3)
        if measured.num_decoded and decode > 0:
            figures["decode_tokens_per_s"] = round(measured.num_decoded / decode, 1)
            num_read = measured.num_decode_steps * capabilities.weight_bytes
            num_read += _kv_tokens_read(workload) * figures["kv_bytes_per_token"]
            figures["decode_gb_per_s"] = round(num_read / decode / 1e9, 2)
            figures.update(_limits(capabilities.details, num_read / decode))
    return figures


def _limits(details: Mapping[str, str], bytes_per_s: float) -> dict[str, Any]:
    """The limits of this machine, and the share of its memory's speed that decoding reached; native kernels only."""
    if not {"instruction set", "threads"} <= details.keys():
        return {}
    from octavo.benchmarks.limits import measure_limits

    limits = measure_limits(details["instruction set"], int(details["threads"]), LIMIT_SECONDS)
    return {
        "limits": {name: round(rate) for name, rate in limits.items()},
        "share_of_dram": round(bytes_per_s / limits["dram_read"], 4),
    }


def _kv_tokens_read(workload: Workload) -> int:
    """Positions that decoding attends to, over all sequences: the k-th token after the first sees input_len + k."""
    num_after = workload.output_len - 1
    return workload.num_prompts * (num_after * workload.input_len + num_after * (num_after + 1) // 2)


def _print(figures: dict[str, Any]) -> None:
    from octavo.kv.sizing import format_bytes

    work = figures["workload"]
    rows = [
        ("Model", figures["model"]),
        ("Work", f"{work['num_prompts']} sequences of {work['input_len']} + {work['output_len']} tokens"),
        ("CPU", figures["cpu"]),
        ("Load", f"{figures['load_s']:.2f} s"),
        ("Total time", f"{figures['total_s']:.2f} s in {figures['num_steps']} steps"),
        ("Output", f"{figures['output_tokens_per_s']:,.1f} tok/s"),
        ("Input and output", f"{figures['total_tokens_per_s']:,.1f} tok/s"),
    ]
    if "prefill_s" in figures:
        rows.append(
            (
                "Until all have a token",
                f"{figures['prefill_s']:.2f} s = {figures['prefill_tokens_per_s']:,.1f} prompt tok/s",
            )
        )
    if "decode_tokens_per_s" in figures:
        rows.append(("After that", f"{figures['decode_tokens_per_s']:,.1f} output tok/s"))
        read = f"{figures['decode_gb_per_s']:.2f} GB/s of weights and KV"
        if "limits" in figures:
            limit = figures["limits"]["dram_read"] / 1e9
            read += f" = {figures['share_of_dram']:.0%} of the {limit:.1f} GB/s of this machine"
        rows.append(("Read in decode", read))
    rows += [
        ("Preemptions", str(figures["num_preemptions"])),
        ("Peak memory", format_bytes(figures["peak_rss_bytes"])),
        ("Weights", format_bytes(figures["weight_bytes"])),
        ("Output sha256", figures["output_sha256"]),
    ]
    rows += [(f"  {name}", value) for name, value in {**figures["config"], **figures["kernels"]}.items()]
    print_rows(rows)
