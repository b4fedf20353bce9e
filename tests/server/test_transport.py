"""CORS, TLS, deadlines, and clients that send or read too slowly."""

from __future__ import annotations

import json
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import MODEL, LiveServer, live_server, write_tokenizer
from support.served_program import program

import octavo.server.client
import octavo.server.intake
import octavo.server.protocol
from octavo.errors import ConfigError
from octavo.server.listen import check_certificate, check_origins

COMPLETIONS = "/v1/completions"
TLS = Path(__file__).resolve().parent.parent / "data" / "tls"
PREFLIGHT = {
    "Origin": "https://app.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}

# ---------------------------------------------------------------------------- CORS


def test_preflight_with_cors(tmp_path: Path) -> None:
    """C040: a preflight needs no key, the request after it does."""
    settings = {"api_key": "k3y", "cors_origins": ("https://app.example",)}
    with live_server(tmp_path, settings=settings) as live:
        answer = live.http.options(live.url + COMPLETIONS, headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in answer.headers
        body = {"prompt": "x", "max_tokens": 2}
        refused = live.post(COMPLETIONS, body, Origin="https://app.example")
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        good = live.post(COMPLETIONS, body, Origin="https://app.example", Authorization="Bearer k3y")
        assert good.status_code == 200 and "X-Request-Id" in good.headers["access-control-expose-headers"]
        other = live.http.options(live.url + COMPLETIONS, headers={**PREFLIGHT, "Origin": "https://evil.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


def test_no_cors_unless_asked(live: LiveServer) -> None:
    for answer in (
        live.http.options(live.url + COMPLETIONS, headers=PREFLIGHT),
        live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, Origin="https://app.example"),
    ):
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_all_origins_without_credentials(tmp_path: Path) -> None:
    with live_server(tmp_path, settings={"cors_origins": ("*",)}) as live:
        answer = live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, Origin="https://any.example")
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


def test_origins_are_checked() -> None:
    check_origins(["*", "https://a.example", "http://localhost:3000", "chrome-extension://abc"])
    for bad in ("", "a.example", "https://a.example/", "https://*.example", "https://a b"):
        with pytest.raises(ConfigError, match="cors_origin"):
            check_origins([bad])


# ---------------------------------------------------------------------------- TLS


def test_https(tmp_path: Path) -> None:
    certificate, key = str(TLS / "certificate.pem"), str(TLS / "key.pem")
    with program(write_tokenizer(tmp_path), 1.0, ssl_certfile=certificate, ssl_keyfile=key) as served:
        url = f"https://127.0.0.1:{served.port}"
        context = ssl.create_default_context(cafile=certificate)
        with httpx.Client(verify=context, timeout=20) as http:
            answer = http.post(f"{url}/v1/completions", content=served.body(max_tokens=3))
            assert answer.json()["choices"][0]["text"] == "aaa"
            body = served.body(max_tokens=3, stream=True)
            assert http.post(f"{url}/v1/completions", content=body).text.endswith("[DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            served.http.get(f"http://127.0.0.1:{served.port}/health")


def test_certificates_are_checked(tmp_path: Path) -> None:
    certificate, key = str(TLS / "certificate.pem"), str(TLS / "key.pem")
    check_certificate(None, None)
    check_certificate(certificate, key)
    for files, words in (
        ((None, key), "needs ssl_certfile"),
        ((certificate, None), "certificate and private key that match"),
        ((str(tmp_path / "none.pem"), key), "cannot be read: No such file"),
        ((key, key), "certificate and private key that match"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_certificate(*files)


# ---------------------------------------------------------------------------- time


def test_deadline(tmp_path: Path) -> None:
    """504 before the first byte, an error frame after it; the blocks are free again."""
    with live_server(tmp_path, settings={"request_timeout": 0.3}) as live:
        live.model.gate.clear()
        late = live.post(COMPLETIONS, {"prompt": "x"})
        assert late.status_code == 504 and late.json()["error"]["code"] == "request_timeout"
        live.model.gate.set()
        live.wait_until(lambda: live.idle)
        live.model.delay = 0.02
        cut = live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 200, "stream": True})
        *frames, error, done = [f for f in cut.text.split("\n\n") if f]
        assert done == "data: [DONE]" and len(frames) > 2
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"
        live.model.delay = 0.0
        live.check_idle_and_live()


def test_deadline_of_the_client(tmp_path: Path) -> None:
    with live_server(tmp_path, settings={"request_timeout": 30}) as live:
        live.model.delay = 0.02
        body = {"prompt": "x", "max_tokens": 200}
        late = live.post(COMPLETIONS, body, **{"X-Request-Timeout": "0.1"})
        assert late.status_code == 504
        live.model.delay = 0.0
        assert live.post(COMPLETIONS, body, **{"X-Request-Timeout": "999"}).status_code == 200
        for bad in ("0", "-1", "soon", "1e3", "inf", "99999999"):
            refused = live.post(COMPLETIONS, body, **{"X-Request-Timeout": bad})
            assert refused.status_code == 400 and "X-Request-Timeout" in refused.json()["error"]["message"]
        live.check_idle_and_live()


# ---------------------------------------------------------------------------- slow clients


def connect(live: LiveServer, content: bytes, length: int | None = None) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(20)
    made.connect(live.address)
    num = len(content) if length is None else length
    made.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {num}\r\n\r\n".encode() + content)
    return made


def closed(connection: socket.socket) -> bytes:
    """Everything until the server closes; a reset counts."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "temperature": 0, "prompt": "x", **fields}).encode()


def test_reader_that_never_reads_is_closed(tmp_path: Path) -> None:
    """After the write timeout its connection ends, and with it the request."""
    with live_server(tmp_path, write_timeout=0.3) as live:
        live.model.delay = 0.001
        with connect(live, body(stream=True, n=64, logprobs=20, max_tokens=200)):
            live.wait_until(lambda: live.client.num_open == 1)
            live.wait_until(lambda: live.idle, 20)
        live.wait_until(lambda: live.server._state.num_in_flight == 0)
        live.model.delay = 0.0
        live.check_idle_and_live()


def test_reader_that_never_reads_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the write timeout: what piles up for it is given up."""
    monkeypatch.setattr(octavo.server.client, "MAX_PENDING", 5000)
    with live_server(tmp_path, num_blocks=2048) as live:
        # About 8 MB of frames: twice what the kernel buffers for a socket. The request may be gone before one can look.
        with connect(live, body(stream=True, n=100, logprobs=20, max_tokens=250)):
            live.wait_until(lambda: live.metric('octavo_request_success_total{finished_reason="abort"') == 1, 20)
        live.wait_until(lambda: live.idle, 20)
        live.wait_until(lambda: live.server._state.num_in_flight == 0)
        live.check_idle_and_live()


def test_slow_reader_that_reads_is_served(tmp_path: Path) -> None:
    """It takes several times the write timeout, but something is read in each."""
    with live_server(tmp_path, write_timeout=0.3) as live:
        with connect(live, body(stream=True, n=32, max_tokens=60)) as connection:
            data = b""
            begun = time.monotonic()
            while not data.endswith(b"0\r\n\r\n"):
                data += connection.recv(32768 if time.monotonic() - begun < 1.5 else 1 << 20)
                time.sleep(0.02)
        assert b"[DONE]" in data and b'"error"' not in data
        live.check_idle_and_live()


def test_headers_and_bodies_that_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo.server.protocol, "HEADER_TIMEOUT", 0.3)
    monkeypatch.setattr(octavo.server.intake, "BODY_TIMEOUT", 0.3)
    with live_server(tmp_path) as live:
        with socket.create_connection(live.address, timeout=10) as silent:
            assert closed(silent) == b""
        with socket.create_connection(live.address, timeout=10) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
            assert closed(slow) == b""
        with connect(live, b'{"model":', 100) as half:
            answer = half.recv(65536)
            assert b"408" in answer.split(b"\r\n")[0] and b"body_timeout" in answer
        live.check_idle_and_live()
