"""/tokenize and /detokenize: vLLM's shapes, and the very ids that the generation routes use."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.live_server import MODEL, SPECIALS, LiveServer, live_server


def test_prompt(live: LiveServer) -> None:
    prompt = "red é <|im_end|>"
    answer = live.http.post(f"{live.url}/tokenize", json={"prompt": prompt, "return_token_strs": True}).json()
    ids = [*b"red ", 0xC3, 0xA9, ord(" "), live.token_id("<|im_end|>")]
    assert answer == {
        "count": 8,
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": [*"red", "Ġ", "Ã", "©", "Ġ", "<|im_end|>"],
    }
    back = live.http.post(f"{live.url}/detokenize", json={"model": MODEL, "tokens": ids})
    assert back.json() == {"prompt": prompt}


def test_messages_count_what_chat_counts(live: LiveServer) -> None:
    messages = [{"role": "user", "content": f"say {SPECIALS[1]}"}]
    counted = live.http.post(f"{live.url}/tokenize", json={"model": MODEL, "messages": messages}).json()
    assert counted["token_strs"] is None
    chat = live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == counted["count"] == len(counted["tokens"])
    text = live.http.post(f"{live.url}/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nsay <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert counted["tokens"].count(live.token_id("<|im_end|>")) == 1  # the user's own is plain text
    half = {"messages": [*messages, {"role": "assistant", "content": "ab"}], "continue_final_message": True}
    continued = live.http.post(f"{live.url}/tokenize", json=half).json()["tokens"]
    assert continued[: len(counted["tokens"])] == counted["tokens"]
    assert continued[len(counted["tokens"]) :] == [*b"ab"]
    without = live.http.post(f"{live.url}/tokenize", json={"messages": messages, "add_generation_prompt": False})
    assert without.json()["count"] == counted["count"] - len("xassistant\n")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
        ("/tokenize", {"prompt": "a", "odd": 1}, 400, "odd"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, 400,
         "add_special_tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [268]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**20]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "nope"}, 404, "model"),
    ],
)  # fmt: skip
def test_refusals(live: LiveServer, path: str, body: dict[str, object], status: int, param: str) -> None:
    response = live.http.post(f"{live.url}{path}", json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


def test_empty_ones(live: LiveServer) -> None:
    assert live.http.post(f"{live.url}/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert live.http.post(f"{live.url}/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_the_key_guards_them(tmp_path: Path) -> None:
    with live_server(tmp_path, settings={"api_key": "secret"}) as live:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert live.http.post(f"{live.url}{path}", json=body).status_code == 401
            headers = {"Authorization": "Bearer secret"}
            assert live.http.post(f"{live.url}{path}", json=body, headers=headers).status_code == 200
