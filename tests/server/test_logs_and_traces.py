"""JSON log lines with request ids, from both processes; OpenTelemetry spans."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.live_server import live_server, write_tokenizer
from support.served_program import program

from octavo import logs
from octavo.errors import ConfigError
from octavo.server.tracing import Tracer

COMPLETIONS = "/v1/completions"


@pytest.fixture
def lines() -> Any:
    """What a handler with the JSON format writes, as a function that gives the objects so far."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter("server"))
    root, requests = logging.getLogger(), logging.getLogger("octavo.requests")
    root.addHandler(handler)
    requests.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    requests.setLevel(logging.NOTSET)


def test_finished_requests(tmp_path: Path, lines: Any) -> None:
    with live_server(tmp_path) as live:
        live.post(COMPLETIONS, {"prompt": "line\nfeed", "max_tokens": 3}, **{"X-Request-Id": "mine/1"})
        live.wait_until(lambda: any(x["logger"] == "octavo.requests" for x in lines()))
    (line,) = (x for x in lines() if x["logger"] == "octavo.requests")
    assert (line["level"], line["process"], line["request_id"]) == ("info", "server", "mine/1")
    assert line["time"].endswith("+00:00") and "mine/1" in line["message"]
    assert line["request"]["num_generated_tokens"] == 3 and line["request"]["route"] == COMPLETIONS


def test_errors_name_their_request(tmp_path: Path, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception is one line, however long its traceback, with the id that its client got."""
    with live_server(tmp_path) as live:
        monkeypatch.setattr("octavo.server.completions.make_prompts", lambda *args: 1 / 0)
        response = live.post(COMPLETIONS, {"prompt": "x"})
        assert response.status_code == 500
    (line,) = (x for x in lines() if "exception" in x)
    assert line["request_id"] == response.headers["x-request-id"] and line["level"] == "error"
    assert "ZeroDivisionError" in line["exception"]
    assert "request_id" not in json.loads(logs.JsonFormatter("x").format(logging.makeLogRecord({"msg": "idle"})))


def test_both_processes(tmp_path: Path) -> None:
    """All of stderr is JSON: what the front end says of a restart, and what engine processes say."""
    directory = write_tokenizer(tmp_path)
    with program(
        directory, 1.0, log_format="json", max_restarts=1, assemble="support.scripted_process:talkative"
    ) as served:
        os.kill(served.children()[0], signal.SIGKILL)
        served.http.post(f"http://127.0.0.1:{served.port}/v1/completions", content=served.body(max_tokens=2))
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0
        assert served.process.stderr is not None
        told = [json.loads(line) for line in served.process.stderr.read().splitlines()]
    assert {x["process"] for x in told} == {"server", "engine"}
    assert any("restart 1 of at most 1" in x["message"] for x in told)


# ---------------------------------------------------------------------------- spans


def test_spans(tmp_path: Path) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    tracer = Tracer("", "the-model", exporter=exporter)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with live_server(tmp_path, settings={"tracer": tracer}) as live:
        live.model.delay = 0.01
        headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-Id": "span-1"}
        live.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 5}, **headers)
        live.wait_until(lambda: len(exporter.get_finished_spans()) == 4)
        spans = {span.name: span for span in exporter.get_finished_spans()}
        root = spans["POST /v1/completions"]
        assert f"{root.context.trace_id:032x}" == trace and f"{root.parent.span_id:016x}" == parent
        assert root.attributes["gen_ai.usage.input_tokens"] == 3
        assert root.attributes["gen_ai.usage.output_tokens"] == 5
        assert root.attributes["gen_ai.response.id"] == "span-1"
        assert root.attributes["gen_ai.response.model"] == "the-model"
        assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
        phases = [spans[name] for name in ("queue", "prefill", "decode")]
        assert all(span.parent.span_id == root.context.span_id for span in phases)
        assert root.start_time <= phases[0].start_time and phases[2].end_time == root.end_time
        for before, after in itertools.pairwise(phases):
            assert before.end_time == after.start_time
        assert phases[2].end_time - phases[2].start_time >= 30_000_000  # four steps of 10 ms
        assert phases[1].end_time - phases[1].start_time >= 9_000_000
        exporter.clear()
        live.model.delay = 0.0
        live.model.fail_steps = {live.model.num_steps}
        live.post(COMPLETIONS, {"prompt": "abc"}, traceparent="garbage")
        live.wait_until(lambda: exporter.get_finished_spans())
        (failed,) = exporter.get_finished_spans()
        assert failed.status.status_code.name == "ERROR" and failed.parent is None
    tracer.close()


def test_no_collector_is_no_trouble(tmp_path: Path) -> None:
    """A collector that does not answer costs neither requests nor the shutdown."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with pytest.raises(ConfigError, match="must be a URL"):
        Tracer("localhost:4317")
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    tracer = Tracer("http://127.0.0.1:9/v1/traces")
    with live_server(tmp_path, settings={"tracer": tracer}) as live:
        live.check_idle_and_live()
    tracer.close()
