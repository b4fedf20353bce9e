"""Faults below the HTTP layer (C172): visible, bounded to who is concerned, never a hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.live_server import LiveServer, live_server

import octavo.server.generation
from octavo.text.output import SequenceOutput

COMPLETIONS = "/v1/completions"


def test_step_fault(live: LiveServer) -> None:
    """An exception of the backend ends the requests of that step with 500; the next ones work."""
    live.model.fail_steps = {live.model.num_steps}
    response = live.post(COMPLETIONS, {"prompt": "x"})
    assert response.status_code == 500
    assert "scripted failure" in response.json()["error"]["message"]
    live.check_idle_and_live()


def test_text_fault(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault while decoding costs one request its answer, and no other."""
    push = SequenceOutput.push

    def faulty(self: SequenceOutput, event: object) -> object:
        if self._params.seed == 13:
            raise ZeroDivisionError
        return push(self, event)  # type: ignore[arg-type]

    monkeypatch.setattr(octavo.server.generation.SequenceOutput, "push", faulty)
    for stream in (False, True):
        response = live.post(COMPLETIONS, {"prompt": "x", "seed": 13, "stream": stream})
        assert response.status_code == 500 and response.json()["error"]["code"] == "generation_failed"
    live.check_idle_and_live()


def test_admission_fault(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even an unexpected exception while a request is admitted leaves the loop running."""

    def faulty(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(live.engine, "make_request", faulty)
    assert live.post(COMPLETIONS, {"prompt": "x"}).status_code == 500
    monkeypatch.undo()
    live.check_idle_and_live()


def test_loop_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the engine itself breaks, all get an error, health says so, and the server stops with a failure."""
    with live_server(tmp_path) as live:
        live.model.delay = 0.005
        with live.send_raw(COMPLETIONS, {"prompt": "x", "max_tokens": 200, "stream": True}) as connection:
            live.wait_until(lambda: live.engine.scheduler.running)
            monkeypatch.setattr(live.engine, "step", lambda: 1 / 0)
            data = b""
            while part := connection.recv(65536):
                data += part
        assert (b'"error"' in data and data.rstrip().endswith(b"[DONE]\n\n\r\n0")) or b"503" in data
        live.wait_until(lambda: live.server.failure is not None)
        assert "ZeroDivisionError" in str(live.server.failure)


def test_draining(tmp_path: Path) -> None:
    """While draining: 503 for new requests and for health."""
    with live_server(tmp_path) as live:
        live.server._state.draining = True
        for response in (live.post(COMPLETIONS, {"prompt": "x"}), live.http.get(f"{live.url}/health")):
            assert response.status_code == 503 and response.headers["retry-after"] == "1"
            assert response.json()["error"]["message"] == "the server is shutting down"
