"""What broke other servers: odd messages and ids, routes without a key, faults in each layer (C026 to C079, C172)."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from support.live_server import MODEL, TEMPLATE, LiveServer, live_server

import octavo.server.chat
import octavo.server.completions
from octavo.server.app import create_app
from octavo.server.envelope import OPEN_PATHS
from octavo.server.state import ServerSettings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_rejects_a_role(tmp_path: Path, stream: bool) -> None:
    """C026: the template's own words, as JSON, whatever was asked for."""
    template = TEMPLATE.replace("'forbidden'", "'system'")
    with live_server(tmp_path, chat_template=template) as live:
        messages = [{"role": "system", "content": "x"}, USER]
        response = live.post(CHAT, {"messages": messages, "stream": stream})
        assert response.status_code == 400 and response.headers["content-type"] == "application/json"
        assert "no such role here" in response.json()["error"]["message"] and len(response.content) < 1000
        live.check_idle_and_live()


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([{"role": "user", "content": []}], 400),
        ([{"role": "user"}], 400),
        ([{"role": "robot", "content": "x"}], 400),
        ([{"role": 3, "content": "x"}], 400),
        (["x"], 400),
        ([{"role": "user", "content": [{"type": "text"}]}], 400),
        ([{"role": "user", "content": [{"text": "x"}]}], 400),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], 400),
        ([{"role": "system", "content": ""}, USER], 200),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], 200),
    ],
)
def test_odd_messages(live: LiveServer, messages: Any, code: int) -> None:
    """C034."""
    response = live.post(CHAT, {"messages": messages, "max_tokens": 1})
    assert response.status_code == code, response.text
    if code == 400:
        assert response.json()["error"]["param"].startswith("messages")


def test_parts_are_joined(live: LiveServer) -> None:
    """C034: text parts are the text with a line feed between."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined, whole = (
        live.http.post(f"{live.url}/tokenize", json={"messages": [{"role": "user", "content": content}]}).json()
        for content in (parts, "a\nb")
    )
    assert joined["tokens"] == whole["tokens"] and joined["count"] > 3


def test_every_route_wants_the_key(tmp_path: Path) -> None:
    """C041: those of the application itself, so that a new one cannot be forgotten."""
    with live_server(tmp_path, settings={"api_key": "sk-1234567890"}) as live:
        app = create_app(live.client, live.tokenizer, ServerSettings(model_name="m", max_model_len=1, vocab_size=1))
        routes = [route for route in app.routes if isinstance(route, Route)]
        closed = [route for route in routes if route.path not in OPEN_PATHS]
        assert len(closed) > 12 and len(routes) - len(closed) == len(OPEN_PATHS)
        for route in closed:
            path = route.path.replace("{model:path}", MODEL).replace("{id:path}", "x").replace("{id}", "x")
            for method in sorted(route.methods or ()):
                response = live.http.request(method, live.url + path, content=b"{}" if method == "POST" else None)
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"


def test_expect_and_unread_bodies(live: LiveServer) -> None:
    """C052: the go-ahead is given before a body is sent; a refusal leaves the connection usable."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(live.address, timeout=10) as connection:
        connection.sendall(head % len(body))
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(body)
        assert b'"text":"aa"' in connection.recv(65536)
        unread = b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000
        connection.sendall(unread + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = b""
        while part := connection.recv(65536):
            data += part
        assert data.startswith(b"HTTP/1.1 404") and data.count(b"HTTP/1.1 200 OK") == 1


def test_ids_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    """C079: a padded vocabulary. Such ids have no text, in an answer, its log-probabilities and a prompt."""
    with live_server(tmp_path, settings={"vocab_size": 300}) as live:
        live.model.vocab_size = 300
        lacking = live.tokenizer.vocab_size + 5
        answer = [ord("a"), lacking, ord("b"), 299]
        live.model.script = lambda spec: answer[len(spec.token_ids) - spec.num_prompt]
        body = {"prompt": [ord("x"), lacking], "max_tokens": 4, "logprobs": 1, "echo": True}
        choice = live.complete(**body)["choices"][0]
        assert choice["text"] == "xab" and choice["logprobs"]["tokens"] == ["x", "", "a", "", "b", ""]
        assert "".join(f["choices"][0]["text"] for f in live.stream(COMPLETIONS, body)) == "xab"
        chat = live.post(CHAT, {"messages": [USER], "max_tokens": 4, "logprobs": True, "top_logprobs": 2}).json()
        assert chat["choices"][0]["message"]["content"] == "ab"


# ---------------------------------------------------------------------------- faults


def faulty(*args: object, **kwargs: object) -> Any:
    raise ZeroDivisionError


def break_tokenizer(live: LiveServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(live.tokenizer, "encode", faulty)


def break_scheduler(live: LiveServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(live.engine.scheduler, "plan", faulty)


def break_commit(live: LiveServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(live.engine.scheduler, "commit", faulty)


def break_renderer(live: LiveServer, patch: pytest.MonkeyPatch) -> None:
    for module in (octavo.server.completions.CompletionRenderer, octavo.server.chat.ChatRenderer):
        patch.setattr(module, "full", faulty)
        patch.setattr(module, "chunks", faulty)


def break_a_row(live: LiveServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(live.model, "row_error", lambda row: "the logits are not numbers")


@pytest.mark.parametrize(
    "damage", [break_tokenizer, break_scheduler, break_commit, break_renderer, break_a_row], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_fault_in_any_layer(
    live: LiveServer, damage: Callable[..., None], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C172: a visible error for whoever is concerned, whole and streamed; then the server is as before."""
    damage(live, monkeypatch)
    asked = {"prompt": "fault"} if path == COMPLETIONS else {"messages": [USER]}
    for stream in (False, True):
        response = live.post(path, {**asked, "max_tokens": 3, "stream": stream})
        if response.status_code == 200:  # the stream had begun
            assert stream and '"error"' in response.text and response.text.rstrip().endswith("data: [DONE]")
        else:
            assert response.status_code == 500 and response.json()["error"]["message"], response.text
        assert "Traceback" not in response.text and len(response.content) < 2000
    monkeypatch.undo()
    live.check_idle_and_live()
