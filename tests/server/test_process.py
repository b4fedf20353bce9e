"""`run_server` with the engine in its own process: ready, stop, and every way to die."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
from pathlib import Path

import pytest
from support.live_server import write_tokenizer
from support.served_program import alive, check_port_free, program, wait_gone

from octavo.config import EngineOptions
from octavo.errors import ConfigError, CorruptFileError, EngineError, OctavoError
from octavo.server.serve import ServeOptions, run_server
from octavo.server.supervisor import SupervisedEngineClient


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def ends_with_error(lines: list[bytes]) -> bool:
    return lines[-1] == b"data: [DONE]" and "error" in json.loads(lines[-2].removeprefix(b"data: "))


def test_serves_drains_and_exits(directory: Path) -> None:
    """C173: SIGTERM lets what is in flight end; new requests get 503; then exit 0, no child, port free."""
    with program(directory, 10.0) as served:
        url = f"http://127.0.0.1:{served.port}"
        assert served.http.get(f"{url}/health").status_code == 200
        whole = served.http.post(f"{url}/v1/completions", content=served.body(max_tokens=5)).json()
        assert whole["choices"][0]["text"] == "aaaaa"
        children = served.children()
        assert len(children) == 1
        lines = [served.start_stream(120) for _ in range(3)]
        served.process.send_signal(signal.SIGTERM)
        late = 200
        while late == 200:  # the signal is noticed at the next tick
            late = served.http.get(f"{url}/health").status_code
        assert late == 503
        refused = served.http.post(f"{url}/v1/completions", content=served.body())
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert served.end() == 0
        for stream in lines:
            assert stream[-1] == b"data: [DONE]"
            texts = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in stream[:-1]]
            assert "".join(t["text"] for t in texts) == "a" * 120
            assert texts[-1]["finish_reason"] == "length"
        wait_gone(children)
        check_port_free(served.port)


def test_no_time_to_drain(directory: Path) -> None:
    """C173: when the time is up, streams end with an error frame and [DONE]; SIGINT is the same as SIGTERM."""
    with program(directory, 0.0) as served:
        children = served.children()
        lines = served.start_stream(250)
        served.process.send_signal(signal.SIGINT)
        assert served.end() == 0
        assert ends_with_error(lines)
        wait_gone(children)


def test_second_signal_exits_at_once(directory: Path) -> None:
    with program(directory, 1000.0) as served:
        children = served.children()
        served.start_stream(250)
        served.process.send_signal(signal.SIGTERM)
        served.process.send_signal(signal.SIGINT)
        served.end()
        wait_gone(children)


def test_client_that_never_reads(directory: Path) -> None:
    """C173: it cannot hold up the end."""
    with program(directory, 0.0) as served:
        body = served.body(max_tokens=250, stream=True, n=100, logprobs=20)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", served.port))
            deaf.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            deaf.recv(100)
            children = served.children()
            served.process.send_signal(signal.SIGTERM)
            assert served.end() == 0
        wait_gone(children)
        check_port_free(served.port)


def test_engine_process_dies(directory: Path) -> None:
    """Without restarts: in-flight requests get an error; the server exits non-zero with one line."""
    with program(directory, 10.0, max_restarts=0) as served:
        lines = served.start_stream(250)
        os.kill(served.children()[0], signal.SIGKILL)
        assert served.end() == 2
        assert ends_with_error(lines)
        assert served.process.stderr is not None
        odd_preset, error = served.process.stderr.read().splitlines()
        assert odd_preset.startswith("generation_config is partly ignored: top_k")
        assert error == "error: the engine process ended unexpectedly (signal 9)"
        check_port_free(served.port)


def test_front_end_is_killed(directory: Path) -> None:
    """No engine process outlives its front end, however that ends."""
    with program(directory, 10.0) as served:
        children = served.children()
        served.process.kill()
        wait_gone(children)


def test_port_in_use_is_told_before_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            run_server(
                model="x",
                engine=EngineOptions(),
                serve=ServeOptions(port=port, assemble="support.scripted_process:vanish"),
            )


def test_unknown_host() -> None:
    with pytest.raises(ConfigError, match="host"):
        run_server(model="x", engine=EngineOptions(), serve=ServeOptions(host="no.such.host.invalid", port=0))


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("corrupt", CorruptFileError, "tensor blk.0 ends after the file"),
        ("broken", EngineError, "could not start: RuntimeError: surprise"),
        ("vanish", EngineError, "ended unexpectedly .exit code 7."),
        ("missing", EngineError, "could not start: AttributeError"),
    ],
)
def test_engine_cannot_start(
    function: str, kind: type[OctavoError], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind, match=words):
        run_server(
            model="x",
            engine=EngineOptions(),
            serve=ServeOptions(port=0, assemble=f"support.scripted_process:{function}"),
        )


def test_client_alone(directory: Path) -> None:
    """Progress, the messages until it is ready and a clean end, without HTTP."""
    seen: list[tuple[str, float]] = []
    client = SupervisedEngineClient(str(directory), EngineOptions(), assemble="support.scripted_process:assemble")
    try:
        opened = client.wait_opened(lambda stage, fraction: seen.append((stage, fraction)))
        assert pickle.loads(opened.tokenizer_source) == directory
        ready = client.wait_ready()
        assert seen == [("Loading", 1.0)]
        assert ready.model_name == "fake" and ready.max_model_len == 256
        assert ready.generation_config == {"temperature": 0.5, "top_k": -7}
        assert ready.report == ["Weights: none"]
    finally:
        client.kill()
    assert not alive(client.pid)


def test_structured_output_crosses_to_the_engine_process(directory: Path) -> None:
    """The wish is compiled again on the other side; a bad one never gets there."""
    with program(directory, 1.0) as running:
        url = f"http://127.0.0.1:{running.port}/v1/completions"
        wish = {"json": {"enum": ["é", "b"]}}
        answer = running.http.post(url, content=running.body(structured_outputs=wish, max_tokens=20))
        assert answer.status_code == 200 and json.loads(answer.json()["choices"][0]["text"]) in ("é", "b")
        bad = running.http.post(url, content=running.body(structured_outputs={"regex": "["}))
        assert bad.status_code == 400
