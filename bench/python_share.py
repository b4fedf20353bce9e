"""Python's share of a step: CPU time of plan, arrays, commit, messages and text, next to the native call.

    python bench/python_share.py --num-seqs 64 --steps 100

Python's parts are measured in CPU time of their thread, which other processes on the machine do not stretch; the native
call in wall time, as the sum of its ops. The engine's parts and the front end's run in two processes under `octavo
serve`; here they run one after the other, so that each can be told apart. Figures are medians over the steps in which
all sequences decode.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, TypeVar

import click
import msgspec

from octavo.backends.inputs import flatten, unflatten

T = TypeVar("T")

ENGINE_PARTS = ("plan", "arrays", "results", "commit", "encode")
FRONT_PARTS = ("decode", "text", "frames")


class Stopwatch:
    """CPU seconds of this thread by part, one list entry per step."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[..., T], *args: Any) -> T:
        start = time.thread_time()
        result = call(*args)
        self.parts.setdefault(name, []).append(time.thread_time() - start)
        return result

    def forget_step(self) -> None:
        """The engine's parts of the last step do not count."""
        for name in ("plan", "arrays", "results", "commit"):
            if self.parts.get(name):
                self.parts[name].pop()

    def medians(self) -> dict[str, float]:
        return {name: median(values) for name, values in self.parts.items()}


def measure(assembly: Any, num_seqs: int, input_len: int, steps: int) -> dict[str, float]:
    """Seconds of each part of a step in which `num_seqs` sequences decode."""
    from octavo import SamplingParams
    from octavo.server.sse import frame
    from octavo.server.wire import Events, Message
    from octavo.text.output import SequenceOutput

    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Message).decode
    engine, tokenizer = assembly.engine, assembly.tokenizer
    params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    outputs, vocab_size = {}, engine.backend.capabilities.vocab_size
    for i in range(num_seqs):
        ids = [(i * 7919 + k * 31) % (vocab_size - 1) + 1 for k in range(input_len)]
        engine.add_request(engine.make_request(str(i), ids, params))
        outputs[str(i)] = SequenceOutput(tokenizer, params, ids)
    watch, native = Stopwatch(), []
    _watch_engine(engine, watch)
    while engine.has_unfinished:
        before = sum(engine.backend.op_seconds.values())
        events = engine.step()
        if len(events) != num_seqs or any(event.finish_reason for event in events):
            watch.forget_step()
            continue
        native.append(sum(engine.backend.op_seconds.values()) - before)
        message = watch.time("encode", encode, Events(events))
        received = watch.time("decode", decode, message)
        deltas = watch.time("text", lambda got: [outputs[e.request_id].push(e) for e in got.events], received)
        watch.time("frames", lambda made: [frame(_chunk(delta.text)) for delta in made], deltas)
    return {**watch.medians(), "native": median(native)}


def _watch_engine(engine: Any, watch: Stopwatch) -> None:
    """Puts the watch around the Python parts of Engine.step and of the backend's execute."""
    from octavo.backends.cpu import backend as native

    scheduler = engine.scheduler
    scheduler.plan = partial(watch.time, "plan", scheduler.plan)
    scheduler.commit = partial(watch.time, "commit", scheduler.commit)
    native.flatten = partial(watch.time, "arrays", flatten)  # type: ignore[assignment]
    native.unflatten = partial(watch.time, "results", unflatten)  # type: ignore[assignment]


def _chunk(text: str) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    return {"id": "cmpl-0123456789", "created": 0, "model": "m", "object": "text_completion", "choices": [choice]}


@click.command(help="Python's share of a step; see the head of bench/python_share.py.")
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--num-seqs", type=click.IntRange(1, 1024), default=64, show_default=True)
@click.option("--input-len", type=click.IntRange(1), default=128, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(model: str, num_seqs: int, input_len: int, steps: int, as_json: bool) -> None:
    from octavo.assemble import assemble
    from octavo.config import EngineOptions

    options = EngineOptions(max_num_seqs=num_seqs, max_model_len=input_len + steps + 16, seed=0)
    assembly = assemble(model, options)
    seconds = measure(assembly, num_seqs, input_len, steps)
    assembly.close()
    engine, front = (sum(seconds[part] for part in parts) for parts in (ENGINE_PARTS, FRONT_PARTS))
    shares = {
        "engine_share": engine / (engine + seconds["native"]),
        "front_share": front / (engine + seconds["native"]),
    }
    if as_json:
        click.echo(json.dumps({"seconds": seconds, **shares}))
        return
    for name in (*ENGINE_PARTS, *FRONT_PARTS, "native"):
        click.echo(f"{name:<8} {seconds[name] * 1e6:>10,.0f} us  {seconds[name] / num_seqs * 1e6:>8.2f} us a sequence")
    click.echo(f"Python in the engine process: {shares['engine_share']:.2%} of a step")
    click.echo(f"Python in the front end, while the next step runs: {shares['front_share']:.2%} of a step")


if __name__ == "__main__":
    main()
