"""`octavo bench serve` against a real server on a scripted model, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.live_server import MODEL, LiveServer, live_server

from octavo.benchmarks.http import HttpError, Target, fetch
from octavo.benchmarks.latency import Slo, figures_of, percentile
from octavo.benchmarks.load import Outcome
from octavo.benchmarks.traffic import Lengths, arrival_times, make_prompts
from octavo.cli import main
from octavo.errors import ConfigError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("server"), max_num_seqs=8) as made:
        made.model.delay = 0.005  # so that tokens come one by one
        yield made


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", *argv])
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


SMALL = ("--num-prompts", "6", "--input-len", "12", "--output-len", "5", "--vocab-size", "200", "--warmup", "1")


def test_completions_with_token_ids(capsys: pytest.CaptureFixture[str], server: LiveServer) -> None:
    code, out, err = bench(capsys, "--base-url", server.url, *SMALL, "--json")
    assert (code, err) == (0, "")
    figures = json.loads(out)
    assert figures["model"] == MODEL
    assert figures["prompt_kind"] == "ids"
    assert (figures["num_requests"], figures["num_failed"], figures["errors"]) == (6, 0, {})
    assert (figures["num_input_tokens"], figures["num_output_tokens"]) == (72, 30)
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        spread = figures[name]
        assert 0 <= spread["p50"] <= spread["p90"] <= spread["p99"]
    assert figures["ttft_ms"]["p99"] <= figures["e2e_ms"]["p99"]
    server.wait_until(lambda: server.idle)


def test_chat_with_a_rate_a_limit_and_goals(
    capsys: pytest.CaptureFixture[str], server: LiveServer, tmp_path: Path
) -> None:
    argv = ("--endpoint", "chat", "--request-rate", "200", "--max-concurrency", "2")
    plot = tmp_path / "plot.svg"
    slo = ("--slo-ttft-ms", "60000", "--slo-itl-ms", "60000")
    code, out, _ = bench(capsys, "--base-url", server.url + "/v1/", *SMALL, *argv, *slo, "--plot", str(plot))
    assert code == 0
    for text in ("6 of 6", "at most 2 in flight", "200 requests/s (Poisson)", "100.0% of requests", "TTFT", "p99"):
        assert text in out
    root = ElementTree.parse(plot).getroot()
    assert root.tag.endswith("svg")
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 4


def test_mix_of_lengths_without_usage(capsys: pytest.CaptureFixture[str], server: LiveServer) -> None:
    argv = ("--lengths", "sharegpt", "--input-len", "20", "--output-len", "9", "--num-prompts", "5", "--no-usage")
    more = ("--vocab-size", "200", "--prompt-kind", "text", "--json", "--extra-body", '{"top_k": 1}')
    code, out, _ = bench(capsys, "--base-url", server.url, *argv, *more)
    figures = json.loads(out)
    prompts = make_prompts(5, Lengths("sharegpt", 20, 9), 200, 0)
    assert code == 0
    # Chunks are counted, and a busy machine may put two tokens into one.
    assert 5 <= figures["num_output_tokens"] <= sum(prompt.num_output for prompt in prompts)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--base-url", "ftp://x"), "base-url"),
        (("--base-url", "http://127.0.0.1:99999"), "base-url"),
        (("--base-url", "http://127.0.0.1:1"), "cannot talk to 127.0.0.1:1"),
        (("--request-rate", "0"), "--request-rate"),
        (("--request-rate", "nan"), "--request-rate"),
        (("--num-prompts", "0"), "--num-prompts"),
        (("--extra-body", "[1]"), "extra-body is not a JSON object"),
        (("--endpoint", "chat", "--prompt-kind", "ids"), "prompt-kind ids"),
        (("--temperature", "-1"), "temperature"),
        (("--plot", "/no/such/directory/x.svg"), "plot: no directory"),
        (("--api-key", "a\r\nb"), "api-key"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str) -> None:
    code, out, err = bench(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("octavo: error: ")
    assert err.count("\n") == 1
    assert text in err


def test_what_the_server_refuses_is_said(capsys: pytest.CaptureFixture[str], server: LiveServer) -> None:
    code, _, err = bench(capsys, "--base-url", server.url, "--input-len", "5000", "--vocab-size", "200")
    assert code == 2
    assert "warm-up request failed: HTTP 400" in err
    code, _, err = bench(capsys, "--base-url", server.url, *SMALL, "--model", "another")
    assert code == 2
    assert "HTTP 404" in err


# ---------------------------------------------------------------------------- servers that misbehave


@contextmanager
def raw_server(*pieces: bytes) -> Iterator[Target]:
    """Answers one request with `pieces`, sent one by one, then closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(BrokenPipeError, ConnectionResetError):  # a client that has seen enough leaves
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.recv(65536)
                for piece in pieces:
                    connection.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Target.parse(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(10)


def read(*pieces: bytes) -> tuple[int, bytes, bytes]:
    body = bytearray()
    with raw_server(*pieces) as target:
        status, error = asyncio.run(fetch(target, "POST", "/completions", b"{}", body.extend, 10))
    return status, error, bytes(body)


OK = b"HTTP/1.1 200 OK\r\n"


def test_bodies_of_all_kinds() -> None:
    assert read(OK + b"Content-Length: 5\r\n\r\nhello") == (200, b"", b"hello")
    assert read(OK + b"\r\nun", b"til the end") == (200, b"", b"until the end")
    assert read(b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno") == (503, b"no", b"")
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7;x=1\r\n, world\r\n0\r\n\r\n"
    assert read(chunked) == (200, b"", b"hello, world")
    assert read(*(chunked[i : i + 1] for i in range(len(chunked)))) == (200, b"", b"hello, world")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 abc\r\n\r\n", "not HTTP"),
        (OK + b"Content-Length: 50\r\n\r\nshort", "middle of the answer"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel", "middle of the answer"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "not HTTP"),
        (b"", "middle of the answer"),
    ],
)
def test_broken_answers(answer: bytes, text: str) -> None:
    with pytest.raises(HttpError, match=text):
        read(answer)


# ---------------------------------------------------------------------------- arithmetic


def test_percentiles_are_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    rng = random.Random(1)
    for n in (1, 2, 3, 10, 101):
        values = sorted(rng.random() for _ in range(n))
        for q in (0, 50, 90, 99, 100):
            assert percentile(values, q) == pytest.approx(numpy.percentile(values, q), abs=1e-12)


def outcome(due: float, sent: float, texts: list[float], ended: float, **more: Any) -> Outcome:
    return Outcome(due, sent, ended, texts, num_input=10, num_output=len(texts), **more)


def test_figures_of_a_known_run() -> None:
    outcomes = [
        outcome(10.0, 10.5, [11.0, 11.1, 11.3], 11.4),
        outcome(10.0, 10.0, [10.2], 10.3),
        outcome(10.0, 10.0, [], 12.0, error="HTTP 503: busy"),
    ]
    figures = figures_of(outcomes, 10.0, Slo(ttft_ms=600, itl_ms=150), from_due=False)
    assert figures["total_s"] == 2.0
    assert figures["num_failed"] == 1
    assert figures["errors"] == {"HTTP 503: busy": 1}
    assert figures["output_tokens_per_s"] == 2.0
    assert figures["ttft_ms"] == {"mean": 350.0, "p50": 350.0, "p90": 470.0, "p99": 497.0}
    assert figures["itl_ms"]["p50"] == 150.0
    assert figures["tpot_ms"]["p50"] == 150.0
    assert figures["e2e_ms"]["p50"] == 600.0
    assert figures["share_within_slo"] == pytest.approx(1 / 3, abs=1e-4)  # the first one's slowest gap is 200 ms
    assert figures["goodput_requests_per_s"] == 0.5
    late = figures_of(outcomes, 10.0, Slo(), from_due=True)
    assert late["ttft_ms"]["p50"] == 600.0
    assert "goodput_requests_per_s" not in late


def test_traffic_is_fixed_by_its_seed() -> None:
    mix = Lengths("sharegpt", 1024, 1024)
    assert make_prompts(20, mix, 1000, 3) == make_prompts(20, mix, 1000, 3)
    assert make_prompts(20, mix, 1000, 3) != make_prompts(20, mix, 1000, 4)
    prompts = make_prompts(4000, mix, 1000, 0)
    assert all(len(p.token_ids) == p.num_input == len(p.text.split()) for p in prompts)
    assert all(4 <= p.num_input <= 1024 and 4 <= p.num_output <= 1024 for p in prompts)
    # Means of the mix after the cut: close below 161 and 338.
    assert 135 < sum(p.num_input for p in prompts) / 4000 < 161
    assert 270 < sum(p.num_output for p in prompts) / 4000 < 338
    with pytest.raises(ConfigError):
        make_prompts(1, mix, 1, 0)


def test_arrivals_are_a_poisson_process() -> None:
    assert arrival_times(3, float("inf"), 0) == [0.0, 0.0, 0.0]
    times = arrival_times(10_000, 50.0, 0)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)
