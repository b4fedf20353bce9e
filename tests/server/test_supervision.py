"""The engine process is killed, hangs or is poisoned under load: answers stay what they would have been."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import write_tokenizer
from support.served_program import Program, alive, check_port_free, program, wait_gone

DEADLY = "support.scripted_process:deadly"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


@pytest.fixture
def served(directory: Path) -> Iterator[Program]:
    with program(directory, 10.0, assemble=DEADLY) as made:
        yield made


def ask(served: Program, **fields: Any) -> httpx.Response:
    body = {"ignore_eos": True, "skip_special_tokens": False, "seed": 3, "temperature": 0.9, **fields}
    url = f"http://127.0.0.1:{served.port}/v1/completions"
    return httpx.post(url, content=served.body(**body), timeout=60)


def answer(response: httpx.Response) -> Any:
    """What a client sees of an answer, but ids, times and what the cache gave."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        body = response.json()
        del body["usage"]["prompt_tokens_details"]  # what was cached or shared depends on what went before
        return [body["choices"], body["usage"]]
    frames = [f.removeprefix("data: ") for f in response.text.split("\n\n") if f]
    assert frames[-1] == "[DONE]"
    parts: dict[int, list[Any]] = {}
    for frame in frames[:-1]:
        chunk = json.loads(frame)
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return [whole(parts[index]) for index in sorted(parts)]


def whole(chunks: list[Any]) -> Any:
    """The choice that a stream adds up to, however its tokens were spread over chunks."""
    logprobs: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in (chunk["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    return ["".join(c["text"] for c in chunks), logprobs, chunks[-1]["finish_reason"]]


def together(jobs: list[Callable[[], Any]]) -> Callable[[], list[Any]]:
    """Starts all; the result waits for all and gives their values."""
    values: list[Any] = [None] * len(jobs)

    def work(i: int) -> None:
        values[i] = jobs[i]()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()

    def join() -> list[Any]:
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a request is stuck"
        return values

    return join


def kill_engine(served: Program) -> int:
    (child,) = served.children()
    os.kill(child, signal.SIGKILL)
    return child


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def health(served: Program) -> int:
    return served.http.get(f"http://127.0.0.1:{served.port}/health").status_code


def restarts(served: Program) -> float:
    text = served.http.get(f"http://127.0.0.1:{served.port}/metrics").text
    (line,) = (x for x in text.splitlines() if x.startswith("octavo_engine_restarts_total"))
    return float(line.rpartition(" ")[2])


REQUESTS: list[dict[str, Any]] = [
    {"prompt": "one", "max_tokens": 90},
    {"prompt": "two", "max_tokens": 90, "stream": True, "logprobs": 2},
    {"prompt": "three", "max_tokens": 60, "n": 3, "stream": True, "logprobs": 0},
    {"prompt": ["four", "five"], "max_tokens": 70, "n": 2, "logprobs": 1, "echo": True},
    {"prompt": "six", "max_tokens": 80, "temperature": 0, "stream": True, "prompt_logprobs": 1},
    {"prompt": "seven", "max_tokens": 80, "presence_penalty": 1.5, "stop": ["a", "Z"], "n": 4},
    {"prompt": "nine", "max_tokens": 60, "n": 2, "best_of": 5},
    {"prompt": "ten", "max_tokens": 60, "use_beam_search": True, "best_of": 3, "temperature": 0},
    {"prompt": "eight", "max_tokens": 80, "min_tokens": 20, "ignore_eos": False, "n": 3},
]


def test_killed_twice_under_load(served: Program) -> None:
    """kill -9, twice, while every kind of request runs: the bytes are those of a quiet run."""
    expected = [answer(ask(served, **fields)) for fields in REQUESTS]
    join = together([lambda fields=fields: answer(ask(served, **fields)) for fields in REQUESTS])
    for seconds in (0.25, 0.2):
        time.sleep(seconds)
        gone = kill_engine(served)
        wait_for(lambda: health(served) == 503)
        wait_for(lambda: health(served) == 200)
        assert not alive(gone)
    assert join() == expected
    assert restarts(served) == 2


def test_request_without_a_seed_goes_on(served: Program) -> None:
    """Its seed was drawn before the first engine saw it. What arrived before the kill is compared on replay."""
    lines: list[str] = []

    def read() -> None:
        body = served.body(prompt="x", max_tokens=120, stream=True, temperature=1.0, ignore_eos=True, n=2)
        url = f"http://127.0.0.1:{served.port}/v1/completions"
        with httpx.stream("POST", url, content=body, timeout=60) as response:
            lines.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: len(lines) > 40)
    kill_engine(served)
    thread.join(30)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]" and not any("error" in c for c in chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("length") == 2


def test_clients_that_come_during_a_restart_are_served(served: Program) -> None:
    expected = answer(ask(served, prompt="late"))
    kill_engine(served)
    wait_for(lambda: health(served) == 503)
    assert answer(ask(served, prompt="late")) == expected


def test_client_that_leaves_during_a_restart(served: Program) -> None:
    """Nothing of it is replayed."""
    kill_engine(served)
    wait_for(lambda: health(served) == 503)
    url, body = f"http://127.0.0.1:{served.port}/v1/completions", served.body(prompt="x", max_tokens=400)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, content=body, timeout=0.05)
    wait_for(lambda: health(served) == 200)
    answer(ask(served, prompt="y", max_tokens=3))
    text = served.http.get(f"http://127.0.0.1:{served.port}/metrics").text
    assert "octavo_num_requests_running{" in text
    (line,) = (x for x in text.splitlines() if x.startswith("octavo_num_requests_running"))
    assert float(line.rpartition(" ")[2]) == 0


def test_poison_alone(served: Program) -> None:
    """Two deaths, then an error; the same again is refused at once and nobody is hurt."""
    response = ask(served, prompt="KILL")
    assert response.status_code == 500
    assert "ended twice" in response.json()["error"]["message"]
    wait_for(lambda: health(served) == 200)
    assert restarts(served) == 2
    again = ask(served, prompt="KILL", seed=4)
    assert again.status_code == 400 and again.json()["error"]["code"] == "request_quarantined"
    assert restarts(served) == 2
    answer(ask(served, prompt="KIL"))


def test_poison_in_a_crowd(served: Program) -> None:
    """Only the culprit is given up; the others get what they would have got."""
    crowd = [{"prompt": f"guest {i}", "max_tokens": 40, "stream": i % 2 == 0} for i in range(3)]
    expected = [answer(ask(served, **fields)) for fields in crowd]
    join = together([lambda f=fields: ask(served, **f) for fields in [*crowd[:3], {"prompt": "KILL"}, *crowd[3:]]])  # type: ignore[misc]
    responses = join()
    culprit = responses.pop(3)
    assert culprit.status_code == 500 and "ended twice" in culprit.json()["error"]["message"]
    assert [answer(r) for r in responses] == expected
    assert health(served) == 200


def test_two_deaths_by_chance(served: Program) -> None:
    """A request that sees two deaths among others, and none alone, is served."""
    other = {"prompt": "y", "max_tokens": 120}
    expected = answer(ask(served, **other))
    join = together([lambda: answer(ask(served, prompt="ONCE2KILL")), lambda: answer(ask(served, **other))])
    first, second = join()
    assert second == expected and first[0][0]["finish_reason"] == "length"


def test_hanging_engine(directory: Path) -> None:
    """The watchdog ends an engine whose step does not; the requests go on. Also one that is stopped while idle."""
    with program(directory, 10.0, assemble=DEADLY, step_timeout=0.5) as served:
        expected = answer(ask(served, prompt="calm", max_tokens=60))
        join = together([lambda: ask(served, prompt="HANG"), lambda: ask(served, prompt="calm", max_tokens=60)])
        hung, calm = join()
        assert hung.status_code == 200 and answer(calm) == expected
        assert restarts(served) == 1
        os.kill(served.children()[0], signal.SIGSTOP)
        assert answer(ask(served, prompt="calm", max_tokens=60)) == expected
        assert restarts(served) == 2


def test_restart_that_fails(directory: Path) -> None:
    """When the model is gone, the server tries, then stops with the reason; waiting clients get an error."""
    with program(directory, 10.0, assemble=DEADLY, max_restarts=2) as served:
        (directory / "refuse").touch()
        join = together([lambda: ask(served, prompt="x", max_tokens=400)])
        time.sleep(0.2)
        kill_engine(served)
        (response,) = join()
        assert response.status_code == 503
        assert served.end() == 2
        assert served.process.stderr is not None
        assert served.process.stderr.read().splitlines()[-1] == "error: model.gguf: gone"
        check_port_free(served.port)


@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_during_a_restart(directory: Path, signals: int) -> None:
    """No child stays behind, whichever moment it comes at."""
    with program(directory, 0.3, assemble=DEADLY) as served:
        gone = kill_engine(served)
        wait_for(lambda: bool([c for c in served.children() if c != gone]))
        children = served.children()
        for _ in range(signals):
            served.process.send_signal(signal.SIGTERM)
        served.end()
        wait_gone(children)
        check_port_free(served.port)
