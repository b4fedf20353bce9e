"""A grammar that takes long to compile holds up its own request, and nobody else's."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import LiveServer, live_server, write_tokenizer
from support.script_backend import HashBackend
from support.served_program import program, wait_gone

from octavo.config import EngineConfig
from octavo.constraint import Grammar, StructuredOutputsParams
from octavo.engine import Engine
from octavo.errors import RequestError
from octavo.request import SamplingParams
from octavo.server.loop import EngineLoop
from octavo.server.unanswered import Unanswered
from octavo.server.wire import (
    Abort,
    Admitted,
    Command,
    Deferred,
    Events,
    FinishSequence,
    Message,
    Refused,
    Shutdown,
    Submit,
    SubmitSpec,
)
from octavo.text.constraints import ConstraintCompiler
from octavo.text.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"


class GatedCompiler:
    """Compiles nothing while `gate` is not set; `regex` "fail" and "odd" fail in the engine alone."""

    def __init__(self, real: ConstraintCompiler) -> None:
        self.real = real
        self.gate = threading.Event()
        self.begun: list[StructuredOutputsParams] = []

    def find(self, wish: StructuredOutputsParams) -> Grammar | None:
        return self.real.find(wish)

    def compile(self, wish: StructuredOutputsParams) -> Grammar:
        self.begun.append(wish)
        assert self.gate.wait(30)
        if wish.regex == "fail":
            raise RequestError("the regex has no end", param="structured_outputs")
        if wish.regex == "odd":
            raise ZeroDivisionError
        return self.real.compile(wish)


@contextlib.contextmanager
def gated_server(directory: Path, **config: Any) -> Iterator[tuple[LiveServer, GatedCompiler]]:
    """The compiler of the front end is not gated: what is wrong is refused there already."""
    with live_server(directory, **config) as live:
        queue = live.client._engine_loop._compiling
        compiler = GatedCompiler(live.engine.grammars)
        live.engine.grammars = queue._compiler = compiler
        yield live, compiler
        compiler.gate.set()
        live.wait_until(lambda: live.idle and queue.num_sequences == 0)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[LiveServer, GatedCompiler]]:
    with gated_server(tmp_path) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def ask(live: LiveServer, regex: str, **fields: Any) -> httpx.Response:
    with httpx.Client(timeout=30) as http:
        body = {"model": "org/tiny:v1.0", "prompt": "x", "max_tokens": 20, "structured_outputs": {"regex": regex}}
        headers = fields.pop("headers", None)
        return http.post(f"{live.url}{COMPLETIONS}", json={**body, **fields}, headers=headers)


def texts(future: Future[httpx.Response]) -> list[str]:
    response = future.result(30)
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def num_compiling(live: LiveServer) -> float:
    return live.metric("octavo_num_requests_compiling")


def test_others_step_on(gated: tuple[LiveServer, GatedCompiler], pool: ThreadPoolExecutor) -> None:
    live, compiler = gated
    slow = pool.submit(ask, live, "ba{3}d")
    live.wait_until(lambda: compiler.begun)
    live.model.delay = 0.002
    assert live.complete(prompt="hi", max_tokens=30)["usage"]["completion_tokens"] == 30
    assert num_compiling(live) == 1 and not slow.done()
    compiler.gate.set()
    assert texts(slow) == ["baaad"]
    assert num_compiling(live) == 0
    # What is known already waits for nothing.
    compiler.gate.clear()
    assert ask(live, "ba{3}d").json()["choices"][0]["text"] == "baaad"


def test_equal_wishes_are_compiled_once(gated: tuple[LiveServer, GatedCompiler], pool: ThreadPoolExecutor) -> None:
    """Samples, prompts and requests; all of them get their answers."""
    live, compiler = gated
    answers = [
        pool.submit(ask, live, "ca?b", n=2),
        pool.submit(ask, live, "ca?b", prompt=["x", "y"]),
        pool.submit(ask, live, "da?d"),
    ]
    live.wait_until(lambda: num_compiling(live) == 5)
    compiler.gate.set()
    assert [texts(a) for a in answers] == [["cab"] * 2, ["cab"] * 2, ["dad"]]
    assert sorted(wish.regex or "" for wish in compiler.begun) == ["ca?b", "da?d"]


def test_a_failure_is_one_requests_own(gated: tuple[LiveServer, GatedCompiler], pool: ThreadPoolExecutor) -> None:
    live, compiler = gated
    answers = [pool.submit(ask, live, regex, stream=stream) for regex in ("fail", "odd") for stream in (False, True)]
    good = pool.submit(ask, live, "cab")
    live.wait_until(lambda: num_compiling(live) == 5)
    compiler.gate.set()
    bad = [future.result(30) for future in answers]
    assert [response.status_code for response in bad] == [400, 400, 500, 500]
    assert bad[0].json()["error"]["message"] == "the regex has no end"
    assert "could not be compiled (ZeroDivisionError)" in bad[2].json()["error"]["message"]
    assert texts(good) == ["cab"]


def test_who_leaves_is_forgotten(gated: tuple[LiveServer, GatedCompiler], pool: ThreadPoolExecutor) -> None:
    """C170: by leaving, and by a deadline. What nobody wants any more is not compiled."""
    live, compiler = gated
    first = pool.submit(ask, live, "ba{3}d")
    live.wait_until(lambda: compiler.begun)
    for stream in (False, True):
        body = {"prompt": ["x", "y"], "structured_outputs": {"regex": "never"}, "stream": stream}
        with live.send_raw(COMPLETIONS, body):
            live.wait_until(lambda: num_compiling(live) == 3)
        live.wait_until(lambda: num_compiling(live) == 1)
    late = ask(live, "never", headers={"X-Request-Timeout": "0.05"})
    assert late.status_code == 504
    live.wait_until(lambda: num_compiling(live) == 1)
    compiler.gate.set()
    assert texts(first) == ["baaad"]
    assert [wish.regex for wish in compiler.begun] == ["ba{3}d"]
    live.check_idle_and_live()


def test_a_full_line(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """C047: what waits for a grammar is bounded like what waits for a place."""
    with gated_server(tmp_path, max_num_seqs=2, max_num_waiting=2) as (live, compiler):
        held = [pool.submit(ask, live, "ca?b", n=2), pool.submit(ask, live, "da?d", n=2)]
        live.wait_until(lambda: num_compiling(live) == 4)
        refused = ask(live, "ea?e")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert live.complete(prompt="hi", max_tokens=4)["usage"]["completion_tokens"] == 4
        compiler.gate.set()
        assert [texts(future) for future in held] == [["cab"] * 2, ["dad"] * 2]


def test_the_server_ends_meanwhile(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with live_server(tmp_path) as live:
        compiler = GatedCompiler(live.engine.grammars)
        live.engine.grammars = live.client._engine_loop._compiling._compiler = compiler
        waiting = pool.submit(ask, live, "cab")
        live.wait_until(lambda: compiler.begun)
        live.server.stop()
        assert waiting.result(30).status_code == 503
    compiler.gate.set()


def test_an_engine_that_dies_of_it_or_meanwhile(tmp_path: Path) -> None:
    """The next engine compiles it again, and the client gets what it would have got."""
    slow = "support.scripted_process:slow_grammars"
    with program(write_tokenizer(tmp_path), 10.0, assemble=slow) as served, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{served.port}{COMPLETIONS}"
        body = served.body(structured_outputs={"regex": "ba{3}d"}, n=2)
        waiting = pool.submit(httpx.post, url, content=body, timeout=60)
        while not (tmp_path / "compiling").exists():
            assert not waiting.done(), waiting.result().text
        assert served.http.post(url, content=served.body(max_tokens=5)).status_code == 200
        (engine,) = served.children()
        os.kill(engine, signal.SIGKILL)
        assert texts(waiting) == ["baaad"] * 2
        wait_gone([engine])


def test_a_compiler_that_hangs(tmp_path: Path) -> None:
    """The watchdog replaces its process, although nothing else hangs there."""
    options = {"assemble": "support.scripted_process:slow_grammars", "step_timeout": 1.0}
    with program(write_tokenizer(tmp_path), 10.0, **options) as served, ThreadPoolExecutor(3) as pool:
        url = f"http://127.0.0.1:{served.port}"
        bodies = [served.body(structured_outputs={"regex": f"x{i}"}) for i in range(3)]
        answers = [pool.submit(httpx.post, url + COMPLETIONS, content=body, timeout=60) for body in bodies]
        assert [texts(answer) for answer in answers] == [[f"x{i}"] for i in range(3)]
        assert served.http.get(f"{url}/health").json()["engine_restarts"] >= 1


def test_what_an_engine_owes() -> None:
    now = [0.0]
    owed = Unanswered(lambda: now[0])
    assert owed.seconds() == 0
    owed.ask(1)
    now[0] = 5
    owed.ask(2)
    assert owed.seconds() == 5
    owed.defer(1)
    owed.defer(9)  # of an engine that is gone
    now[0] = 7
    assert owed.seconds() == 2  # both: the other since it was asked, this one since it was deferred
    owed.defer(2)
    now[0] = 9
    assert owed.seconds() == 4
    owed.answer(2)
    now[0] = 10
    assert owed.seconds() == 1  # one answer of the compiler is a sign of life for all that wait for it
    owed.answer(1)
    assert owed.seconds() == 0
    owed.ask(3)
    owed.ask(4)
    owed.defer(4)
    owed.clear()
    now[0] = 20
    assert owed.seconds() == 0


class ListInbox:
    """Hands out batches of commands; then waits for `wake`, once, and shuts down."""

    def __init__(self, *batches: list[Command]) -> None:
        self.batches = list(batches)
        self.woken = threading.Event()

    def receive(self, *, block: bool) -> list[Command]:
        if self.batches:
            return self.batches.pop(0)
        if not block:
            return []
        if self.woken.is_set():
            return [Shutdown()]
        assert self.woken.wait(30)
        return []

    def wake(self) -> None:
        self.woken.set()


def test_what_is_said_of_samples_meanwhile(tmp_path: Path) -> None:
    """As after a restart: of three requests one is aborted, and of another a sample is over, before they begin."""
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path))
    compiler = GatedCompiler(ConstraintCompiler(lambda: tokenizer, tokenizer.vocab_size))
    engine = Engine(
        EngineConfig(max_model_len=64, num_blocks=32), HashBackend(vocab_size=tokenizer.vocab_size), grammars=compiler
    )
    params = SamplingParams(
        n=2, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[ab]{4}"), temperature=0
    )
    specs = [SubmitSpec(request_id=i, prompt_token_ids=[1, 2], params=params) for i in ("a", "b", "c")]
    alone = SubmitSpec(request_id="d", prompt_token_ids=[1, 2], params=params)
    inbox = ListInbox(
        [Submit(1, specs), Submit(2, [alone])], [FinishSequence("b", 1), Abort(["a", "d"])], [Abort(["unknown"])]
    )
    messages: list[Message] = []

    def emit(message: Message) -> None:
        messages.append(message)
        if isinstance(message, Refused):
            compiler.gate.set()

    EngineLoop(engine, inbox, emit).run()
    events = [event for message in messages if isinstance(message, Events) for event in message.events]
    ended = [(e.request_id, e.index) for e in events if e.finish_reason is not None]
    assert sorted(ended) == [("b", 0), ("c", 0), ("c", 1)]
    told = [(type(m), m.ticket) for m in messages if not isinstance(m, Events)]
    assert told == [(Deferred, 1), (Deferred, 2), (Refused, 2), (Admitted, 1)]
    assert len(compiler.begun) == 1


def test_what_is_left_of_a_submission_waits_for_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_tokenizer(tmp_path))
    compiler = GatedCompiler(ConstraintCompiler(lambda: tokenizer, tokenizer.vocab_size))
    engine = Engine(
        EngineConfig(max_model_len=64, num_blocks=32), HashBackend(vocab_size=tokenizer.vocab_size), grammars=compiler
    )
    wish = StructuredOutputsParams(regex="ab")
    specs = [
        SubmitSpec(request_id=i, prompt_token_ids=[1], params=SamplingParams(max_tokens=2, structured_outputs=w))
        for i, w in (("shaped", wish), ("free", None))
    ]
    messages: list[Message] = []
    inbox = ListInbox([Submit(1, specs)], [Abort(["shaped"])])
    inbox.woken.set()  # nothing will wake it: the compiler never gets ready
    EngineLoop(engine, inbox, messages.append).run()
    events = [event for message in messages if isinstance(message, Events) for event in message.events]
    assert [e.request_id for e in events if e.finish_reason is not None] == ["free"]
    compiler.gate.set()
