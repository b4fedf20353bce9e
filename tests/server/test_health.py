"""/health says what is true now: of an engine that computes, stands still, dies, or is about to end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.live_server import LiveServer, write_tokenizer
from support.served_program import Program, program

from octavo.server.heart import STALL_SECONDS, Heart

DEADLY = "support.scripted_process:deadly"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Program]:
    with program(write_tokenizer(tmp_path), 10.0, assemble=DEADLY) as made:
        yield made


def health(served: Program) -> tuple[int, dict[str, Any]]:
    response = served.http.get(f"http://127.0.0.1:{served.port}/health")
    return response.status_code, response.json()


def wait_for(served: Program, condition: Callable[[int, dict[str, Any]], bool]) -> dict[str, Any]:
    """Polls until the condition holds of status and body; returns the body."""
    deadline = time.monotonic() + 15
    while True:
        code, body = health(served)
        if condition(code, body):
            return body
        assert time.monotonic() < deadline, (code, body)
        time.sleep(0.01)


def complete(served: Program, **fields: Any) -> int:
    url = f"http://127.0.0.1:{served.port}/v1/completions"
    return served.http.post(url, content=served.body(max_tokens=3, ignore_eos=True, **fields)).status_code


def test_quiet(live: LiveServer) -> None:
    body = live.http.get(f"{live.url}/health").json()
    assert body == {"status": "ok", "engine_restarts": 0, "step_running_s": 0.0, "engine_silent_s": 0.0}


def test_an_engine_that_stands_still(served: Program) -> None:
    """A stopped process is told from a busy one, without any request; it goes on where it stood."""
    (engine,) = served.children()
    assert health(served)[1]["status"] == "ok"
    os.kill(engine, signal.SIGSTOP)
    body = wait_for(served, lambda code, body: code == 503)
    assert body["status"] == body["error"]["code"] == "stalled" and body["engine_silent_s"] >= STALL_SECONDS
    assert "stands still" in body["error"]["message"]
    text = served.http.get(f"http://127.0.0.1:{served.port}/metrics").text
    assert "octavo_engine_restarts_total" in text  # what the front end knows is not held back
    os.kill(engine, signal.SIGCONT)
    body = wait_for(served, lambda code, body: code == 200)
    assert body["status"] == "ok" and body["engine_restarts"] == 0
    assert complete(served) == 200 and served.children() == [engine]


def test_a_step_that_takes_long(served: Program) -> None:
    """Liveness probes must not end a server that computes: it says how long the step has been running."""
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(complete, served, prompt="HANG")
        check_busy_engine(served)
        assert hung.result(30) == 200


def check_busy_engine(served: Program) -> None:
    seen = [wait_for(served, lambda code, body: body["status"] == "busy") for _ in range(2)]
    assert seen[0]["step_running_s"] >= 1 and seen[1]["step_running_s"] >= seen[0]["step_running_s"]
    assert health(served)[0] == 200
    (engine,) = served.children()
    os.kill(engine, signal.SIGKILL)
    body = wait_for(served, lambda code, body: code == 503)
    assert body["status"] == "restarting" and body["step_running_s"] == 0
    body = wait_for(served, lambda code, body: code == 200)
    assert body["engine_restarts"] == 1


def test_one_that_stands_still_for_good_is_replaced(tmp_path: Path) -> None:
    """Also where nobody asks for anything."""
    with program(write_tokenizer(tmp_path), 10.0, assemble=DEADLY, step_timeout=1.5) as served:
        (engine,) = served.children()
        os.kill(engine, signal.SIGSTOP)
        wait_for(served, lambda code, body: body["engine_restarts"] == 1 and code == 200)
        assert complete(served) == 200 and served.children() != [engine]


def test_shutting_down(served: Program) -> None:
    served.start_stream(max_tokens=400)
    served.process.send_signal(signal.SIGTERM)
    body = wait_for(served, lambda code, body: code == 503)
    assert body["status"] == "draining" and body["error"]["message"] == "the server is shutting down"


def test_what_the_heart_tells() -> None:
    """Two processes share it by its descriptor."""
    mine = Heart()
    theirs = Heart(os.dup(mine.descriptor))
    assert (mine.pulse().step, mine.pulse().silent) == (0.0, 0.0)
    theirs.begin_step()
    first = mine.pulse().step
    assert mine.pulse().step >= first > 0
    theirs.end_step()
    assert mine.pulse().step == 0
    theirs.start_beating()
    time.sleep(0.01)
    assert mine.pulse().silent > 0
    mine.close()
