"""`octavo bench kernels`: every op of a model by itself, next to the limits of the machine."""

from __future__ import annotations

import json
from typing import Any

import click

from octavo.cli.options import DEFAULT_MODEL, GroupedCommand, option
from octavo.cli.tables import print_rows
from octavo.errors import ConfigError

WORK, MACHINE = "Work", "Machine"
LIMIT_SECONDS = 1.0
READ_SECONDS = 0.05
MAX_ROWS = 4096
RATES = ("gb_per_s", "dram_read_gb_per_s")


def _rows(_ctx: click.Context, _param: click.Parameter, text: str) -> list[int]:
    parts = text.split(",") if text else []
    if any(not (part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= MAX_ROWS) for part in parts):
        raise click.BadParameter(f"takes numbers from 1 to {MAX_ROWS}, separated by commas")
    return [int(part) for part in parts]


@click.command(cls=GroupedCommand)
@click.argument("model", default=DEFAULT_MODEL)
@option("--rows", default="1,8,64", callback=_rows, group=WORK, help="Sequences that decode together.")
@option("--prefill", type=click.IntRange(0, 65536), default=512, group=WORK, help="0: none.")
@option("--context", type=click.IntRange(0, 1_000_000), default=256, group=WORK, help="Tokens before the one decoded.")
@option(
    "--seconds",
    type=click.FloatRange(0.0, 60.0),
    default=0.2,
    group=WORK,
    help="Per op and work; at least three steps.",
)
@option(
    "--load-format",
    type=click.Choice(["auto", "gguf", "safetensors", "dummy"]),
    default="auto",
    group=WORK,
    help="dummy: random weights.",
)
@option("--dummy-format", default="BF16", group=WORK, help="Weight format of dummy weights.")
@option("--threads", type=click.IntRange(1, 1024), group=MACHINE, help="Default: the CPUs this process may use.")
@option("--isa", default="auto", group=MACHINE, help="Instruction set of the kernels.")
@option("--json", "as_json", is_flag=True, group=WORK, help="Print one JSON object instead of tables.")
def bench_kernels(
    model: str,
    rows: list[int],
    prefill: int,
    context: int,
    seconds: float,
    load_format: str,
    dummy_format: str,
    threads: int | None,
    isa: str,
    as_json: bool,
) -> None:
    """Time each op of MODEL on its own: µs, GFLOP/s, GB/s, and the share of what this machine can do.

    Limits are measured first; what reading memory gives, again before and after each op, and "of DRAM" is the share of
    that. The ops of all layers run with the model's own weights; times are medians per op. "step" is the op's time in
    all layers together.
    """
    from octavo.backends.cpu.backend import check_isa
    from octavo.benchmarks.kernels import figures_of, time_kernels, works
    from octavo.benchmarks.limits import measure_limits, memory_reader
    from octavo.models.loading import load_model
    from octavo.progress import StageProgress
    from octavo.system import cpu_info, cpu_model
    from octavo.weights.hub import resolve_model

    check_isa(isa)
    all_work = works(rows, prefill, context)
    if not all_work:
        raise ConfigError("nothing to do: give --rows or --prefill")
    num_threads = threads or cpu_info().num_threads
    with StageProgress() as progress:
        files = resolve_model(model, load_format=load_format)
        loaded = load_model(files, load_format=load_format, dummy_format=dummy_format.upper())
        longest = max(context + 1, prefill)
        if longest > loaded.spec.max_position:
            raise ConfigError(f"{longest} tokens are more than the {loaded.spec.max_position} positions of the model")
        progress("Measuring the machine's limits", 0.0)
        limits = measure_limits(isa, num_threads, LIMIT_SECONDS)
        progress("Measuring the machine's limits", 1.0)
        reader = memory_reader(isa, num_threads)
        timings = time_kernels(
            loaded,
            all_work,
            isa=isa,
            threads=num_threads,
            seconds=seconds,
            read_dram=lambda: reader.rate(READ_SECONDS),
            progress=progress,
        )
        lines = [figures_of(timing, limits) for timing in timings]
    result = {"model": loaded.name, "cpu": cpu_model(), "threads": num_threads, "limits": limits, "kernels": lines}
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result, [work.name for work in all_work])


def _print(result: dict[str, Any], names: list[str]) -> None:
    from octavo.benchmarks.kernels import UNITS

    print_rows([("Model", result["model"]), ("CPU", result["cpu"]), ("Threads", str(result["threads"]))])
    print_rows(
        [(name, f"{rate / 1e9:,.1f} {UNITS[name]}") for name, rate in result["limits"].items()],
        title="Limits of this machine, measured now",
    )
    for name in names:
        lines = [line for line in result["kernels"] if line["work"] == name]
        total = sum(line["step_us"] for line in lines)
        moved, limit = (sum(line[rate] * line["step_us"] for line in lines) / total for rate in RATES)
        table = [("op", "shape", "weights", "n", "us", "step us", "of step", "GFLOP/s", "GB/s", "of DRAM", "of peak")]
        for line in lines:
            table.append(
                (
                    line["site"],
                    line["shape"],
                    line["format"] or "-",
                    str(line["num_ops"]),
                    f"{line['us']:,.1f}",
                    f"{line['step_us']:,.0f}",
                    f"{line['step_us'] / total:.1%}",
                    f"{line['gflop_per_s']:,.1f}",
                    f"{line['gb_per_s']:,.1f}",
                    f"{line['share_of_dram']:.0%}",
                    f"{line['share_of_arithmetic']:.0%} {line['arithmetic']}",
                )
            )
        title = f"{name}: {total / 1e3:,.2f} ms in all ops, {moved:,.1f} GB/s = {moved / limit:.0%} of DRAM"
        print_rows(table, title=title)
