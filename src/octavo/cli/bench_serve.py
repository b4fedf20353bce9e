"""`octavo bench serve`: load on any OpenAI-compatible server, and the latencies that its users would see."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import GroupedCommand, option
from octavo.cli.tables import print_rows
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.benchmarks.load import LoadSettings, Outcome
    from octavo.benchmarks.traffic import Lengths, Prompt
    from octavo.progress import StageProgress

SERVER, TRAFFIC, REQUEST, RESULT = "Server", "Traffic", "Requests", "Result"
AUTO = "auto"
POSITIVE = click.FloatRange(min=0, min_open=True)


def _rate(_ctx: click.Context, _param: click.Parameter, value: float) -> float:
    if math.isnan(value) or value <= 0:
        raise click.BadParameter("must be more than 0, or inf")
    return value


@click.command(cls=GroupedCommand)
@option("--base-url", default="http://127.0.0.1:8000", group=SERVER, help="With or without /v1.")
@option("--model", metavar="NAME", group=SERVER, help="As the server calls it; default: the first that it lists.")
@option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    group=SERVER,
    help="/v1/completions or /v1/chat/completions.",
)
@option("--api-key", metavar="KEY", group=SERVER, help="Sent as a bearer token.")
@option("--timeout", type=POSITIVE, default=600.0, group=SERVER, help="Seconds for one request.")
@option("--num-prompts", type=click.IntRange(1, 1_000_000), default=64, group=TRAFFIC, help="Requests.")
@option(
    "--request-rate",
    type=float,
    callback=_rate,
    default=math.inf,
    group=TRAFFIC,
    help="Requests per second, arriving as a Poisson process; inf: all at once.",
)
@option(
    "--max-concurrency",
    type=click.IntRange(1),
    group=TRAFFIC,
    help="Requests in flight at most; the next goes out when one ends.",
)
@option(
    "--lengths",
    type=click.Choice(["fixed", "sharegpt"]),
    default="fixed",
    group=TRAFFIC,
    help="Exactly --input-len and --output-len tokens, or a log-normal mix cut off there.",
)
@option(
    "--input-len", type=click.IntRange(1, 10_000_000), group=TRAFFIC, help="Prompt tokens. [fixed: 128, sharegpt: 1024]"
)
@option(
    "--output-len",
    type=click.IntRange(1, 10_000_000),
    group=TRAFFIC,
    help="Output tokens. [fixed: 128, sharegpt: 1024]",
)
@option("--warmup", type=click.IntRange(0), default=4, group=TRAFFIC, help="Requests sent before.")
@option("--seed", type=click.IntRange(0), default=0, group=TRAFFIC, help="Fixes prompts and arrivals.")
@option(
    "--prompt-kind",
    type=click.Choice([AUTO, "ids", "text"]),
    default=AUTO,
    group=REQUEST,
    help="Token ids (completions only) or text; auto tries ids first.",
)
@option("--vocab-size", type=click.IntRange(2), default=10_000, group=REQUEST, help="Random token ids stay below this.")
@option("--temperature", type=float, default=0.0, group=REQUEST, help="0 is greedy.")
@option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    group=REQUEST,
    help="Send ignore_eos (vLLM, llama.cpp and Octavo know it), so that outputs have their length.",
)
@option(
    "--usage/--no-usage",
    default=True,
    group=REQUEST,
    help="Ask for token counts (stream_options); without, a chunk counts as a token.",
)
@option("--extra-body", metavar="JSON", group=REQUEST, help="An object merged into every request body.")
@option("--slo-ttft-ms", type=POSITIVE, group=RESULT, help="Goodput counts requests whose first token came in time,")
@option("--slo-itl-ms", type=POSITIVE, group=RESULT, help="and the p99 of whose inter-token times is within this.")
@option("--json", "as_json", is_flag=True, group=RESULT, help="Print one JSON object instead of a table.")
@option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", group=RESULT, help="Write an SVG.")
def bench_serve(
    *,
    base_url: str,
    model: str | None,
    api_key: str | None,
    as_json: bool,
    plot: Path | None,
    slo_ttft_ms: float | None,
    slo_itl_ms: float | None,
    **values: Any,
) -> None:
    """Load a server with streamed requests and report TTFT, ITL, TPOT and E2E latencies, throughput and goodput.

    Times count from the moment a request is due under --request-rate, so that waiting for a free place shows; with
    --max-concurrency alone they count from the moment it is sent.
    """
    from octavo.benchmarks.http import Target
    from octavo.benchmarks.latency import Slo, figures_of
    from octavo.progress import StageProgress

    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"plot: no directory {str(plot.parent)[:200]!r}")
    work = _work(values)
    target = Target.parse(base_url, api_key)
    with StageProgress() as progress:
        run = _event_loop(_run(work, target, model, progress))
    from_due = math.isfinite(work.request_rate)
    figures = {
        "base_url": base_url,
        "model": run.settings.model,
        "endpoint": run.settings.endpoint,
        "prompt_kind": run.settings.prompt_kind,
        "workload": work.describe(),
        **figures_of(run.outcomes, run.start, Slo(slo_ttft_ms, slo_itl_ms), from_due=from_due),
        "client_cpu_share": round(run.cpu_share, 4),
    }
    if figures["num_failed"] == figures["num_requests"]:
        raise ConfigError(f"all requests failed: {next(iter(figures['errors']))}")
    if plot is not None:
        _write_plot(plot, figures, run, from_due)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(figures)


@dataclass(frozen=True, slots=True)
class _Work:
    """The checked options."""

    num_prompts: int
    request_rate: float
    max_concurrency: int | None
    lengths: Lengths
    warmup: int
    seed: int
    vocab_size: int
    prompt_kind: str
    endpoint: str
    temperature: float
    ignore_eos: bool
    usage: bool
    timeout: float
    extra_body: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "request_rate": self.request_rate if math.isfinite(self.request_rate) else None,
            "max_concurrency": self.max_concurrency,
            "lengths": self.lengths.kind,
            "input_len": self.lengths.input_len,
            "output_len": self.lengths.output_len,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class _Run:
    settings: LoadSettings
    outcomes: list[Outcome]
    start: float
    cpu_share: float  # of one core, that this process used


def _work(values: dict[str, Any]) -> _Work:
    from octavo.benchmarks.traffic import Lengths

    kind = values.pop("lengths")
    longest = 128 if kind == "fixed" else 1024
    sizes = [longest if (n := values.pop(name)) is None else n for name in ("input_len", "output_len")]
    try:
        extra = json.loads(values.pop("extra_body") or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError("extra-body is not a JSON object")
    if values["endpoint"] == "chat" and values["prompt_kind"] == "ids":
        raise ConfigError("prompt-kind ids goes with endpoint completions only")
    if not math.isfinite(values["temperature"]) or values["temperature"] < 0:
        raise ConfigError("temperature must be 0 or more")
    return _Work(lengths=Lengths(kind, *sizes), extra_body=extra, **values)


def _event_loop(main: Any) -> Any:
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def _run(work: _Work, target: Any, model: str | None, progress: StageProgress) -> _Run:
    from octavo.benchmarks.load import LoadSettings, first_model, run_load
    from octavo.benchmarks.traffic import arrival_times, make_prompts

    settings = LoadSettings(
        target,
        model or await first_model(target, work.timeout),
        endpoint=work.endpoint,
        prompt_kind="text" if work.endpoint == "chat" or work.prompt_kind == "text" else "ids",
        temperature=work.temperature,
        ignore_eos=work.ignore_eos,
        ask_usage=work.usage,
        max_concurrency=work.max_concurrency,
        timeout=work.timeout,
        extra_body=work.extra_body,
    )
    settings = await _warm_up(work, settings, progress)
    prompts = make_prompts(work.num_prompts, work.lengths, work.vocab_size, work.seed)
    arrivals = arrival_times(work.num_prompts, work.request_rate, work.seed)
    num_tokens = sum(prompt.num_output for prompt in prompts)

    def on_progress(num_ended: int, num_texts: int) -> None:
        progress(f"{work.num_prompts} requests", max(num_ended / work.num_prompts, num_texts / num_tokens))

    cpu_before = time.process_time()
    outcomes, start = await run_load(settings, prompts, arrivals, on_progress)
    cpu = time.process_time() - cpu_before
    return _Run(settings, outcomes, start, cpu / (max(outcome.ended for outcome in outcomes) - start))


async def _warm_up(work: _Work, settings: LoadSettings, progress: StageProgress) -> LoadSettings:
    """Finds out whether the server takes token ids, then sends the warm-up. Raises ConfigError with its complaint."""
    from octavo.benchmarks.load import run_load
    from octavo.benchmarks.traffic import make_prompts

    def prompts(number: int) -> list[Prompt]:
        return make_prompts(number, work.lengths, work.vocab_size, work.seed + 1)

    progress("Warm-up", 0.0)
    if work.prompt_kind == AUTO and settings.prompt_kind == "ids":
        first, _ = await run_load(settings, [replace(prompts(1)[0], num_output=1)], [0.0])
        if first[0].error is not None and first[0].error.startswith(("HTTP 400", "HTTP 422")):
            settings = replace(settings, prompt_kind="text")
    if work.warmup:
        outcomes, _ = await run_load(settings, prompts(work.warmup), [0.0] * work.warmup)
        failed = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        if failed is not None:
            raise ConfigError(f"a warm-up request failed: {failed}")
    progress("Warm-up", 1.0)
    return settings


def _write_plot(path: Path, figures: dict[str, Any], run: _Run, from_due: bool) -> None:
    from octavo.benchmarks.latency import latencies_of
    from octavo.benchmarks.plot import latency_plot

    good = [outcome for outcome in run.outcomes if outcome.error is None]
    each = [latencies_of(outcome, from_due=from_due) for outcome in good]
    title = (
        f"{figures['model']}: {figures['num_requests']} requests, {figures['output_tokens_per_s']:,} output tok/s, "
        f"{figures['requests_per_s']} requests/s"
    )
    svg = latency_plot(
        title,
        [x.ttft * 1e3 for x in each if x.ttft is not None],
        [gap * 1e3 for x in each for gap in x.itl],
        [x.e2e * 1e3 for x in each],
        [moment - run.start for outcome in good for moment in outcome.texts],
    )
    try:
        path.write_text(svg)
    except OSError as error:
        raise ConfigError(f"plot: cannot write {str(path)[:200]!r}: {error.strerror}") from None


def _print(figures: dict[str, Any]) -> None:
    work = figures["workload"]
    lengths = f"{work['input_len']} + {work['output_len']} tokens"
    if work["lengths"] != "fixed":
        lengths = f"lengths like {work['lengths']}, up to {lengths}"
    arrival = "all at once" if work["request_rate"] is None else f"{work['request_rate']:g} requests/s (Poisson)"
    if work["max_concurrency"] is not None:
        arrival += f", at most {work['max_concurrency']} in flight"
    rows = [
        (
            "Server",
            f"{figures['base_url']}, {figures['model']}, {figures['endpoint']}, prompts as {figures['prompt_kind']}",
        ),
        ("Work", f"{work['num_prompts']} requests of {lengths}, {arrival}"),
        ("Succeeded", f"{figures['num_requests'] - figures['num_failed']} of {figures['num_requests']}"),
    ]
    rows += [("  failed", f"{count} x {error}") for error, count in list(figures["errors"].items())[:5]]
    rows += [
        ("Total time", f"{figures['total_s']:.2f} s"),
        ("Tokens", f"{figures['num_input_tokens']:,} in, {figures['num_output_tokens']:,} out"),
        ("Requests", f"{figures['requests_per_s']:,.2f} /s"),
        ("Output", f"{figures['output_tokens_per_s']:,.1f} tok/s"),
        ("Input and output", f"{figures['total_tokens_per_s']:,.1f} tok/s"),
    ]
    if "slo" in figures:
        slo = figures["slo"]
        wanted = [f"TTFT <= {slo['ttft_ms']:g} ms"] if slo["ttft_ms"] is not None else []
        wanted += [f"p99 ITL <= {slo['itl_ms']:g} ms"] if slo["itl_ms"] is not None else []
        share = f"{figures['share_within_slo']:.1%} of requests with {' and '.join(wanted)}"
        rows.append(("Goodput", f"{figures['goodput_requests_per_s']:,.2f} requests/s: {share}"))
    rows.append(("Client's CPU", f"{figures['client_cpu_share']:.1%} of a core"))
    print_rows(rows)
    names = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
    columns = ("mean", "p50", "p90", "p99")
    table: list[tuple[str, ...]] = [("", *columns)]
    for key, name in names.items():
        spread = figures[key]
        table.append((name, *("-" if spread is None else f"{spread[column]:,.2f}" for column in columns)))
    print_rows(table, title="Latency in ms")
