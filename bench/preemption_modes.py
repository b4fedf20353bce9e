"""What a preempted sequence should lose: all its blocks, or from the end as many as are needed, on a virtual clock.

    python bench/preemption_modes.py --seeds 5

200 requests into a pool for 20. Each line is a load and a configuration, with means over the seeds: output tokens per
virtual second, tokens computed again as a share of all computed, preemptions, and the mean latency of a request.
`burst`: all at once under `fcfs`; `ranks`: Poisson arrivals of three levels of priority, slightly more than can be
served, so that the upper ones displace the lower ones.
"""

from __future__ import annotations

import logging
import random
from itertools import product
from statistics import mean
from typing import NamedTuple

import click

from octavo.clock import VirtualClock
from octavo.config import PREEMPTION_MODES, EngineConfig
from octavo.engine import Engine
from octavo.plan import SampleSpec
from octavo.request import SamplingParams
from octavo.virtual import END_ID, StepCost, VirtualBackend

NUM_REQUESTS = 200
MAX_TOKENS = 500


class Load(NamedTuple):
    """Tokens of the prompts and answers by request, and when each arrives, in seconds."""

    prompts: list[int]
    answers: list[int]
    arrivals: list[float]


class Result(NamedTuple):
    tokens_per_second: float
    recomputed: float
    num_preemptions: int
    mean_latency: float


def make_load(lengths: str, seed: int, *, burst: bool) -> Load:
    rng = random.Random(f"{lengths} {seed}")
    low, high = (100, 400) if lengths == "long" else (30, 70)
    prompts = [rng.randint(low, high) for _ in range(NUM_REQUESTS)]
    draw = {
        "alike": lambda: 100,
        "spread": lambda: rng.randint(20, 180),
        "skewed": lambda: min(MAX_TOKENS, 1 + int(rng.expovariate(0.01))),
        "long": lambda: rng.randint(20, 180),
    }[lengths]
    answers = [draw() for _ in range(NUM_REQUESTS)]
    gap = 0.2 if lengths == "long" else 0.1
    now, arrivals = 0.0, []
    for _ in range(NUM_REQUESTS):
        now += 0.0 if burst else rng.expovariate(1 / gap)
        arrivals.append(now)
    return Load(prompts, answers, arrivals)


def run(load: Load, config: EngineConfig, n: int) -> Result:
    clock = VirtualClock()

    def length_of(spec: SampleSpec) -> int:
        return load.answers[spec.token_ids[0] - 1]

    backend = VirtualBackend(clock, StepCost(), length_of=length_of)
    engine = Engine(config, backend, clock=clock, seed=0)
    params = SamplingParams(n=n, max_tokens=MAX_TOKENS)
    num_output, ended, i = 0, {}, 0
    while i < NUM_REQUESTS or engine.has_unfinished:
        while i < NUM_REQUESTS and (load.arrivals[i] <= clock.now() or not engine.has_unfinished):
            clock.advance(max(0.0, load.arrivals[i] - clock.now()))
            ids = [i + 1, *(2 + (31 * i + 7 * j) % 4000 for j in range(load.prompts[i] - 1))]
            options = {"eos_token_ids": frozenset({END_ID}), "priority": i % 3}
            engine.add_request(engine.make_request(str(i), ids, params, **options))
            i += 1
        for event in engine.step():
            num_output += len(event.token_ids)
            if event.finish_reason is not None:
                ended[int(event.request_id)] = clock.now()
    stats = engine.stats()
    recomputed = (stats.num_lost_tokens - stats.num_readmission_hit_tokens) / backend.num_tokens
    latency = mean(ended[i] - load.arrivals[i] for i in range(NUM_REQUESTS))
    return Result(num_output / clock.now(), recomputed, stats.num_preemptions, latency)


def average(results: list[Result]) -> Result:
    return Result(*(mean(values) for values in zip(*results, strict=True)))


def show(result: Result) -> str:
    return (
        f"{result.tokens_per_second:7.0f} tok/s {result.recomputed:6.1%} "
        f"{result.num_preemptions:6.0f} pre. {result.mean_latency:6.1f} s"
    )


@click.command(help="Full against tail preemption; see the head of bench/preemption_modes.py.")
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
def main(seeds: int) -> None:
    logging.disable(logging.WARNING)
    loads = ("alike", "spread", "skewed", "long")
    click.echo(" " * 42 + f"{'full':^42}{'tail':^42}")
    for admission, caching, (kind, n), lengths in product(
        ("foresight", "greedy"), (True, False), (("burst", 1), ("burst", 4), ("ranks", 1)), loads
    ):
        num_blocks = 20 * (350 if lengths == "long" else 150) // 16
        found = {}
        for mode in PREEMPTION_MODES:
            config = EngineConfig(
                max_model_len=1024,
                num_blocks=num_blocks,
                max_num_batched_tokens=128,
                max_num_waiting=1000,
                admission=admission,
                enable_prefix_caching=caching,
                scheduling_policy="fcfs" if kind == "burst" else "priority",
                preemption_mode=mode,
            )
            results = [run(make_load(lengths, seed, burst=kind == "burst"), config, n) for seed in range(seeds)]
            found[mode] = average(results)
        gain = found["tail"].tokens_per_second / found["full"].tokens_per_second - 1
        name = f"{admission:9} {'cache' if caching else 'none':5} {kind} n={n} {lengths:6}"
        click.echo(f"{name:42}{show(found['full'])}   {show(found['tail'])}  {gain:+.1%}")


if __name__ == "__main__":
    main()
