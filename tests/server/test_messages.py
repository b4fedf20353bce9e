"""POST /v1/messages with the real anthropic client, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from support.live_server import MODEL, LiveServer, live_server

END = "<|im_end|>"


def client_of(live: LiveServer, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key=key, max_retries=0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_whole(live: LiveServer) -> None:
    live.chat_script("Say hello", ["Hello", " red", END])
    message = client_of(live).messages.create(
        model=MODEL, max_tokens=20, messages=user("Say hello"), extra_body={"temperature": 0}
    )
    assert [(b.type, b.text) for b in message.content if b.type == "text"] == [("text", "Hello red")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.role, message.type, message.model) == ("assistant", "message", MODEL)
    counted = client_of(live).messages.count_tokens(model=MODEL, messages=user("Say hello"))
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert usage.output_tokens == 3
    again = client_of(live).messages.create(model=MODEL, max_tokens=1, messages=user("Say hello")).usage
    assert again.cache_read_input_tokens and again.input_tokens < counted.input_tokens


def test_ends(live: LiveServer) -> None:
    live.chat_script("Count", [" one", " red", " blue", END])
    create = client_of(live).messages.create
    cut = create(model=MODEL, max_tokens=2, messages=user("Count"))
    assert (cut.stop_reason, cut.content[0].to_dict()) == ("max_tokens", {"type": "text", "text": " one red"})
    stopped = create(model=MODEL, max_tokens=9, messages=user("Count"), stop_sequences=["x", " blue"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " blue")
    assert stopped.content[0].to_dict()["text"] == " one red"


def test_stream(live: LiveServer) -> None:
    live.chat_script("Say hello", ["Hello", " red", END])
    with client_of(live).messages.stream(model=MODEL, max_tokens=20, messages=user("Say hello")) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "Hello red" == message.content[0].to_dict()["text"]
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == 3
    events = list(client_of(live).messages.create(model=MODEL, max_tokens=20, messages=user("Say hello"), stream=True))
    assert list(dict.fromkeys(e.type for e in events)) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    body = {"max_tokens": 1, "messages": user("Say hello"), "stream": True}
    lines = live.post("/v1/messages", body).text.splitlines()
    assert lines[0] == "event: message_start" and not any("[DONE]" in line for line in lines)


def test_blocks_become_the_chat(live: LiveServer) -> None:
    chat = [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "Hi\nthere\nyou"},
        {"role": "assistant", "content": "Hel"},
    ]
    tokens = live.http.post(
        f"{live.url}/tokenize", json={"messages": chat, "continue_final_message": True}
    ).json()["tokens"]  # fmt: skip
    live.model.table[tuple(tokens)] = [[*b"lo", live.token_id(END)]]
    messages: list[Any] = [
        {"role": "user", "content": [
            {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "there"}
        ]},
        {"role": "user", "content": "you"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "Hel"}
        ]},
    ]  # fmt: skip
    system: list[Any] = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
    message = client_of(live).messages.create(model=MODEL, max_tokens=9, system=system, messages=messages)
    assert message.content[0].to_dict()["text"] == "lo"
    counted = client_of(live).messages.count_tokens(model=MODEL, system=system, messages=messages)
    assert counted.input_tokens == len(tokens)


def test_tool_history_is_read(live: LiveServer) -> None:
    """Results of tools are turns of their own; the scripted template writes their text."""
    messages: list[Any] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "a"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
            {"type": "text", "text": "and"},
        ]},
    ]  # fmt: skip
    same = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"), ("tool", "r"), ("user", "and"))]
    same[2]["tool_call_id"] = "t1"
    counted = live.http.post(f"{live.url}/tokenize", json={"messages": same}).json()["count"]
    assert client_of(live).messages.count_tokens(model=MODEL, messages=messages).input_tokens == counted


def test_structured_output(live: LiveServer) -> None:
    """The script says "aaa": the schema leaves only one way to say it."""
    live.chat_script("Say a", ["a", "a"])
    wanted: Any = {"format": {"type": "json_schema", "schema": {"enum": ["aaa"]}}}
    create = client_of(live).messages.create
    message = create(model=MODEL, max_tokens=20, messages=user("Say a"), output_config=wanted)
    assert (message.content[0].to_dict()["text"], message.stop_reason) == ('"aaa"', "end_turn")
    with pytest.raises(anthropic.BadRequestError, match="output_config"):
        create(model=MODEL, max_tokens=20, messages=user("a"), output_config={"format": {"type": "json_schema"}})  # type: ignore[typeddict-item]


def test_explained(live: LiveServer) -> None:
    body = {"messages": user("a"), "max_tokens": 1, "explain": True}
    assert live.post("/v1/messages", body).json()["octavo"]["prompts"]
    lines = live.post("/v1/messages", {**body, "stream": True}).text.splitlines()
    assert '"octavo":{' in lines[-2]
    assert "octavo" not in live.post("/v1/messages", {**body, "explain": False}).json()


def test_failure_in_the_stream(live: LiveServer) -> None:
    live.model.row_error = lambda row: "NaN" if row.start > 40 else None
    stream = client_of(live).messages.create(model=MODEL, max_tokens=60, messages=user("a"), stream=True)
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(stream)
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "odd": 1}]}, "messages[0].odd"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"effort": "high"}}, "output_config"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"temperature": -1}, "temperature"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ],
)
def test_refusals(live: LiveServer, fields: dict[str, Any], field: str) -> None:
    for stream in (False, True):
        body = {"max_tokens": 5, "messages": user("a"), **fields, "stream": stream}
        response = live.post("/v1/messages", body)
        content = response.json()
        assert response.status_code == 400, content
        assert (content["type"], content["error"]["type"]) == ("error", "invalid_request_error")
        assert field in content["error"]["message"]
        assert len(response.content) < 1000


def test_errors_are_the_clients_own(live: LiveServer) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client_of(live).messages.create(model="nope", max_tokens=1, messages=user("a"))
    with pytest.raises(anthropic.NotFoundError):
        client_of(live).messages.count_tokens(model="nope", messages=user("a"))
    with pytest.raises(anthropic.BadRequestError, match="context holds 256 tokens"):
        client_of(live).messages.create(model=MODEL, max_tokens=1, messages=user("a" * 300))
    response = live.http.get(f"{live.url}/v1/messages")
    assert response.status_code == 405 and response.json()["error"]["type"] == "invalid_request_error"
    assert json.loads(live.http.post(f"{live.url}/v1/messages", content=b"{").content)["type"] == "error"


def test_key(tmp_path: Path) -> None:
    with live_server(tmp_path, settings={"api_key": "secret"}) as live:
        with pytest.raises(anthropic.AuthenticationError):
            client_of(live, "wrong").messages.create(model=MODEL, max_tokens=1, messages=user("a"))
        message = client_of(live, "secret").messages.create(model=MODEL, max_tokens=1, messages=user("a"))
        assert message.usage.output_tokens == 1
        both = {"Authorization": "Bearer secret", "x-api-key": "secret"}
        body = {"max_tokens": 1, "messages": user("a")}
        assert live.post("/v1/messages", body, **both).status_code == 401
