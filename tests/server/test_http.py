"""The HTTP surface: bad bodies, methods, paths, keys, ids, limits (cases C035 to C052)."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import MODEL, LiveServer, live_server

import octavo

ROUTES = ("/v1/completions", "/v1/chat/completions")


def check_error(response: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> str:
    """OpenAI's error object, bounded; returns the message."""
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 4096
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    return str(error["message"])


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_and_missing_model(live: LiveServer, path: str, stream: bool) -> None:
    """C035: names are matched byte for byte, before anything else is looked at."""
    for name in ("nope", MODEL + " ", MODEL.upper(), "org/tiny", "v1.0", ""):
        check_error(live.post(path, {"model": name, "stream": stream}), 404, "model_not_found", "model")
    check_error(live.post(path, b"{}"), 400, "missing_field", "model")


def test_model_list(live: LiveServer) -> None:
    card = live.http.get(f"{live.url}/v1/models/{MODEL}").json()
    assert card["id"] == MODEL and card["object"] == "model" and card["max_model_len"] == 256
    check_error(live.http.get(f"{live.url}/v1/models/nope"), 404, "model_not_found")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b'{:"a":1}', b"", b"[]", b'"x"', b"null", '{"prompt":"你好"}'.encode("gbk"), b'{"prompt":NaN}',
        b"[" * 100_000, b'{"messages":[{"a":' + b"[" * 100_000, b'{"metadata":{"a":' + b'{"a":' * 100_000,
        b"\xef\xbb\xbf{}", b'{"model":"m"} x', b'{"prompt":"\\ud800"}', b'{"prompt":"\xff"}', b'{"temperature":1e400}',
        b'{"n":' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_invalid_json(live: LiveServer, path: str, body: bytes) -> None:
    """C037: 400 for each, and the server lives on."""
    check_error(live.post(path, body), 400)


def test_live_after_invalid_json(live: LiveServer) -> None:
    live.check_idle_and_live()


def test_duplicate_keys_take_the_last(live: LiveServer) -> None:
    body = f'{{"model":"{MODEL}","prompt":"hi","max_tokens":9,"max_tokens":2}}'.encode()
    assert live.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 2


def test_errors_do_not_echo(live: LiveServer) -> None:
    """C038: one bounded message, without the input."""
    secret = "s3cr3t" * 2000
    for body in (
        {"messages": [7] * 5000},
        {"messages": [{"role": "user", "content": {"x": secret}}] * 50},
        {"messages": [{"role": secret, "content": "x"}]},
        {"messages": [], "temperature": secret},
    ):
        message = check_error(live.post("/v1/chat/completions", body), 400)
        assert secret[:200] not in message
    message = check_error(live.post("/v1/completions", {"prompt": "x", "y" * 9000: 1}), 400, "unknown_field")
    assert len(message) < 300


@pytest.mark.parametrize("path", ROUTES)
def test_unknown_field_is_named(live: LiveServer, path: str) -> None:
    body = {"prompt": "x", "temperatur": 0} if path == ROUTES[0] else {"messages": [], "temperatur": 0}
    assert "temperatur" in check_error(live.post(path, body), 400, "unknown_field", "temperatur")
    assert "$.stream_options" in check_error(
        live.post(path, {"stream": True, "stream_options": {"nope": 1}}), 400, "unknown_field", "nope"
    )


def test_wrong_types_are_named(live: LiveServer) -> None:
    for name, value in {
        "prompt": 7, "max_tokens": "3", "max_tokens ": 3, "temperature": "hot", "stop": 5, "stream": 1, "n": 1.5,
        "logit_bias": [1], "echo": "yes", "logprobs": True, "seed": 0.5, "stop_token_ids": ["a"],
    }.items():  # fmt: skip
        check_error(live.post(ROUTES[0], {"prompt": "x", name: value}), 400, param=name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "n": 65}, "n"),
        ({"use_beam_search": True, "n": 2, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "n": 2, "top_p": 0.5}, "top_p"),
        ({"early_stopping": True}, "early_stopping"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"best_of": 129}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"store": True}, "store"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_not_there_yet_is_refused(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    """C050, C068: never accepted and then ignored."""
    check_error(live.post(ROUTES[0], {"prompt": "x", **fields}), 400, param=param)
    check_error(live.post(ROUTES[1], {"messages": [{"role": "user", "content": "x"}], **fields}), 400, param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_chat_refusals(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    check_error(live.post(ROUTES[1], {"messages": [{"role": "user", "content": "x"}], **fields}), 400, param=param)


def test_fields_without_effect_are_accepted(live: LiveServer) -> None:
    body = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "best_of": 1, "suffix": None,
        "response_format": {"type": "text"}, "use_beam_search": False, "length_penalty": 1.0, "stop": None,
    }  # fmt: skip
    plain = live.complete(prompt="accepted", max_tokens=3)
    assert live.complete(prompt="accepted", max_tokens=3, **body)["choices"] == plain["choices"]
    del body["suffix"]
    body.update(parallel_tool_calls=True, tools=[], tool_choice="none", modalities=["text"])
    messages = [{"role": "user", "content": "x"}]
    assert live.post(ROUTES[1], {"messages": messages, "max_tokens": 2, **body}).status_code == 200
    check_error(live.post(ROUTES[0], {"prompt": "x", "suffix": "y"}), 400, param="suffix")


def test_methods_and_paths(live: LiveServer) -> None:
    """C052."""
    for path in ROUTES:
        response = live.http.get(live.url + path)
        check_error(response, 405)
        assert response.headers["allow"] == "POST"
    response = live.http.post(live.url + "/v1/models")
    check_error(response, 405)
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}
    for path in ("/v1/model", "/", "/v1/completions/", "/nope?x=1", "/health/"):
        check_error(live.http.post(live.url + path), 404)
    head = live.http.head(live.url + "/health")
    assert head.status_code == 200 and head.content == b""
    assert live.http.get(live.url + "/version").json() == {"version": octavo.__version__}
    # CORS is off: a preflight gets no permission (C040).
    preflight = live.http.options(live.url + ROUTES[1], headers={"Origin": "http://x"})
    assert not any(name.startswith("access-control") for name in preflight.headers)


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def test_raw_http(live: LiveServer) -> None:
    """C052: pipelining, chunked bodies, and a body that declares two lengths."""
    body = json.dumps({"model": MODEL, "prompt": "raw", "max_tokens": 2}).encode()
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:5], body[5:])) + b"0\r\n\r\n"
    get = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection(live.address, timeout=10) as connection:
        connection.sendall(get + get + post + b"Connection: close\r\n\r\n" + chunked)
        answer = read_to_end(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    with socket.create_connection(live.address, timeout=10) as connection:
        connection.sendall(post + b"Content-Length: 5\r\n\r\n" + chunked)
        assert read_to_end(connection).startswith(b"HTTP/1.1 400")
    with socket.create_connection(live.address, timeout=10) as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 400")
    with socket.create_connection(live.address, timeout=10) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: ")
        with contextlib.suppress(OSError):  # the server hangs up in the middle
            for _ in range(200):
                connection.sendall(b"x" * 10_000)
            assert read_to_end(connection).startswith(b"HTTP/1.1 400")
    live.check_idle_and_live()


def test_request_ids(live: LiveServer) -> None:
    """C049: a plain short id is echoed; anything else is replaced; two alike do not meet in the engine."""
    assert live.post(ROUTES[0], {"prompt": "x"}, **{"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for odd in ("x" * 129, "a b", 'a"b'):
        assert live.post(ROUTES[0], {"prompt": "x"}, **{"X-Request-Id": odd}).headers["x-request-id"] != odd
    live.model.gate.clear()
    body = {"max_tokens": 5, "temperature": 0}
    with (
        live.send_raw(ROUTES[0], {"prompt": "same id", **body}) as first,
        live.send_raw(ROUTES[0], {"prompt": "same id", **body}) as second,
    ):
        live.wait_until(lambda: live.client.num_open == 2)
        live.model.gate.set()
        for connection in (first, second):
            assert b"aaaaa" in connection.recv(65536)


def test_key(tmp_path: Path) -> None:
    """C041: every route but two wants the key, and says how."""
    with live_server(tmp_path, settings={"api_key": "k3y"}) as live:
        wrong: list[list[tuple[str, str]]] = [
            [], [("Authorization", "Bearer nope")], [("Authorization", "k3y")], [("Authorization", "Basic k3y")],
            [("Authorization", "Bearer k3y"), ("Authorization", "Bearer nope")], [("Authorization", "Bearer")],
        ]  # fmt: skip
        for headers in wrong:
            for path in (*ROUTES, "/v1/models", f"/v1/models/{MODEL}", "/metrics", "/nope"):
                response = live.http.post(f"{live.url}{path}?api_key=k3y", headers=headers, content=b"{}")
                check_error(response, 401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/version"):
            assert live.http.get(live.url + path).status_code == 200
        for good in ("Bearer k3y", "bearer k3y", "Bearer  k3y"):
            assert live.http.get(live.url + "/v1/models", headers={"Authorization": good}).status_code == 200


def test_body_limit_and_lenient_fields(tmp_path: Path) -> None:
    settings = {"max_body_bytes": 1000, "ignore_unknown_fields": True}
    with live_server(tmp_path, settings=settings) as live:
        check_error(live.post(ROUTES[0], {"prompt": "x" * 1000}), 413, "body_too_large")

        def parts() -> Any:
            yield from [b"x" * 100] * 20

        check_error(live.http.post(live.url + ROUTES[0], content=parts()), 413, "body_too_large")
        assert live.complete(prompt="x", temperatur=0, max_tokens=1)["usage"]["completion_tokens"] == 1
        live.check_idle_and_live()


def test_queue_full(tmp_path: Path) -> None:
    """C047: what is admitted is bounded and complete; the rest is told to come back, with a real status."""
    with live_server(tmp_path, max_num_seqs=2, max_num_waiting=4) as live:
        live.model.delay = 0.005
        long = {"prompt": "q", "max_tokens": 150}
        held = [live.send_raw(ROUTES[0], long) for _ in range(5)]
        live.wait_until(lambda: len(live.engine.scheduler.requests) == 5)
        for late in ({"n": 2}, {"n": 2, "stream": True}, {"prompt": ["a", "b"]}):
            response = live.post(ROUTES[0], {**long, **late})
            check_error(response, 429, "queue_full")
            assert int(response.headers["retry-after"]) >= 1
        held.append(live.send_raw(ROUTES[0], long))  # there was room for one
        for connection in held:
            with connection:
                assert b"a" * 150 in connection.recv(65536)
        live.check_idle_and_live()
