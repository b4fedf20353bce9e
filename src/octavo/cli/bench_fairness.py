"""`octavo bench fairness`: what a long prompt does to those who are being answered, and how long it waits itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import DEFAULT_MODEL, GroupedCommand, engine_options, option, take_engine_options
from octavo.cli.tables import print_rows
from octavo.clock import VirtualClock
from octavo.config import EngineConfig, EngineOptions
from octavo.engine import Engine
from octavo.errors import ConfigError, EngineError
from octavo.kv.sizing import blocks_for
from octavo.request import SamplingParams
from octavo.virtual import StepCost, VirtualBackend

if TYPE_CHECKING:
    from octavo.assemble import Assembly

WORK = "Work"
STREAM_PROMPT = 16  # tokens that the streams begin with
STEADY_STEPS = 20  # decode steps of the streams alone, before the long prompt comes


@dataclass(frozen=True, slots=True)
class Fairness:
    """Times in seconds. `step`: the longest step while the prompt was computed; `alone`: a step of the streams alone.

    `allowed_steps` is what the budget allows: the prompt in chunks of what the streams leave of a step.
    """

    num_streams: int
    input_len: int
    budget: int
    chunk: int
    alone_p50: float
    itl_p50: float
    itl_p99: float
    step: float
    ttft: float
    num_steps: int
    allowed_steps: int

    @property
    def ttft_ratio(self) -> float:
        """Steps that the prompt took, over what the budget allows; the issue's bound is 1.3."""
        return self.num_steps / self.allowed_steps


def measure(engine: Engine, num_streams: int, input_len: int, vocab_size: int, now: Callable[[], float]) -> Fairness:
    """Streams decode, then a prompt of `input_len` tokens arrives; ITL of the streams until its first token."""
    config = engine.config
    chunk = max(1, config.max_num_batched_tokens - num_streams)
    if config.long_prefill_token_threshold:
        chunk = min(chunk, config.long_prefill_token_threshold)
    allowed = -(-input_len // chunk)
    stream_params = SamplingParams(temperature=0, max_tokens=STEADY_STEPS + 2 * allowed + 64, ignore_eos=True)
    streams = [f"stream-{i}" for i in range(num_streams)]
    salt = f"fairness {input_len}"  # a warm-up must leave nothing to hit
    for i, name in enumerate(streams):
        ids = [(7 * i + j) % vocab_size for j in range(STREAM_PROMPT)]
        engine.add_request(engine.make_request(name, ids, stream_params, cache_salt=salt))
    seen = dict.fromkeys(streams, 0)
    while min(seen.values()) < 2:
        _step(engine, seen)
    alone = []
    for _ in range(STEADY_STEPS):
        began = now()
        _step(engine, seen)
        alone.append(now() - began)
    ids = [(11 * j + j // 7) % vocab_size for j in range(input_len)]
    arrival = now()
    engine.add_request(engine.make_request("prompt", ids, SamplingParams(temperature=0, max_tokens=1), cache_salt=salt))
    last = dict.fromkeys(streams, arrival)
    gaps, steps, got = [], [], {"prompt": 0}
    while not got["prompt"]:
        began = now()
        for name in _step(engine, got):
            if name in last:
                gaps.append(now() - last[name])
                last[name] = now()
        steps.append(now() - began)
    ttft = now() - arrival
    for name in streams:
        engine.abort(name)
    while engine.has_unfinished:
        engine.step()
    return Fairness(
        num_streams=num_streams,
        input_len=input_len,
        budget=config.max_num_batched_tokens,
        chunk=chunk,
        alone_p50=_percentile(alone, 0.5),
        itl_p50=_percentile(gaps, 0.5),
        itl_p99=_percentile(gaps, 0.99),
        step=max(steps),
        ttft=ttft,
        num_steps=len(steps),
        allowed_steps=allowed,
    )


def _step(engine: Engine, counts: dict[str, int]) -> list[str]:
    """One step; who got a token."""
    names = []
    for event in engine.step():
        if event.error is not None:
            raise EngineError(f"the benchmark's request {event.request_id} failed: {event.error}")
        if event.token_ids:
            names.append(event.request_id)
            if event.request_id in counts:
                counts[event.request_id] += 1
    return names


def _percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1)]


def virtual_engine(options: EngineOptions, num_streams: int, input_len: int) -> tuple[Engine, VirtualClock]:
    """The real scheduler on a backend that takes virtual time: StepCost per step."""
    clock = VirtualClock()
    room = input_len + STREAM_PROMPT + STEADY_STEPS + 2 * input_len + 256
    config = EngineConfig(
        max_model_len=room,
        num_blocks=(num_streams + 1) * blocks_for(room, options.block_size),
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
    )
    return Engine(config, VirtualBackend(clock, StepCost()), clock=clock, seed=0), clock


@click.command(cls=GroupedCommand)
@click.argument("model", default=DEFAULT_MODEL)
@option("--streams", type=click.IntRange(1, 4096), default=16, group=WORK, help="Running answers.")
@option("--input-len", type=click.IntRange(1), default=2000, group=WORK, help="Of the long prompt.")
@option("--virtual", is_flag=True, group=WORK, help="No model: a virtual clock and a simple cost per step.")
@option("--json", "as_json", is_flag=True, group=WORK, help="Print one JSON object instead of a table.")
@engine_options
def fairness(model: str, streams: int, input_len: int, virtual: bool, as_json: bool, **values: Any) -> None:
    """A long prompt arrives among running answers: their inter-token latency, and its time to first token.

    --max-num-batched-tokens sets how long a step may be; --long-prefill-token-threshold keeps the chunks of
    the prompt smaller than that.
    """
    options = take_engine_options(values)
    if streams >= min(options.max_num_seqs, options.max_num_batched_tokens):
        raise ConfigError("streams must be fewer than max_num_seqs and max_num_batched_tokens")
    if virtual:
        engine, clock = virtual_engine(options, streams, input_len)
        measured = measure(engine, streams, input_len, engine.backend.capabilities.vocab_size, clock.now)
        name = "none (virtual clock)"
    else:
        assembly = _assembly(model, options, streams, input_len)
        vocab_size = assembly.backend.capabilities.vocab_size
        measure(assembly.engine, streams, min(input_len, 64), vocab_size, time.perf_counter)  # warm up
        measured = measure(assembly.engine, streams, input_len, vocab_size, time.perf_counter)
        name = assembly.model.name
        assembly.close()
    figures = {"model": name, **asdict(measured), "ttft_ratio": round(measured.ttft_ratio, 3)}
    if as_json:
        click.echo(json.dumps(figures))
    else:
        print_rows(_rows(name, measured))


def _assembly(model: str, options: EngineOptions, streams: int, input_len: int) -> Assembly:
    from octavo.assemble import assemble
    from octavo.progress import StageProgress

    with StageProgress() as progress:
        assembly = assemble(model, options, progress=progress)
    if input_len >= assembly.config.max_model_len:
        raise ConfigError(f"input-len must be less than max_model_len {assembly.config.max_model_len}")
    return assembly


def _rows(name: str, measured: Fairness) -> list[tuple[str, str]]:
    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.1f} ms"

    return [
        ("Model", name),
        ("Work", f"a prompt of {measured.input_len} tokens among {measured.num_streams} streams"),
        ("Budget", f"{measured.budget} tokens a step, of which the prompt gets {measured.chunk}"),
        ("ITL of the streams alone, p50", ms(measured.alone_p50)),
        ("ITL while the prompt is computed, p50", ms(measured.itl_p50)),
        ("ITL while the prompt is computed, p99", ms(measured.itl_p99)),
        ("Longest step", ms(measured.step)),
        ("TTFT of the prompt", f"{ms(measured.ttft)} in {measured.num_steps} steps"),
        ("Steps that the budget allows", f"{measured.allowed_steps} (ratio {measured.ttft_ratio:.2f})"),
    ]
