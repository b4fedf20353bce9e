"""Log-probabilities over HTTP (F): both shapes, whole and streamed, echo, offsets, bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.live_server import MODEL, LiveServer

from octavo.plan import TokenLogprobs
from octavo.server.logprobs import CompletionLogprobs, chat_logprobs, finite, token_label

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
V = 268
# A forced token has logit 30, all others 0.
FORCED = 30.0 - math.log(math.exp(30.0) + V - 1)
OTHER = -math.log(math.exp(30.0) + V - 1)


def joined(frames: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The logprobs of a completion stream, put together."""
    lists: dict[str, list[Any]] = {}
    for frame in frames:
        for name, values in (frame["choices"][0]["logprobs"] or {}).items():
            lists.setdefault(name, []).extend(values)
    return lists


def test_zero_is_not_nothing(live: LiveServer) -> None:
    """C080."""
    shown = live.complete(prompt=live.script("lp0", ["Hello", " red", "END"]), logprobs=0, max_tokens=3)
    logprobs = shown["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hello", " red", "END"]
    assert logprobs["token_logprobs"] == pytest.approx([FORCED] * 3)
    assert logprobs["top_logprobs"] == [{}, {}, {}]
    assert logprobs["text_offset"] == [0, 5, 9]
    messages = live.chat_script("lp0", ["Hello", "<|im_end|>"])
    chat = live.post(CHAT, {"messages": messages, "logprobs": True, "top_logprobs": 0}).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content] == ["Hello", "<|im_end|>"]
    assert all(c["top_logprobs"] == [] for c in content)
    assert live.complete(prompt="lp none", max_tokens=1)["choices"][0]["logprobs"] is None


def test_chosen_outside_the_top(live: LiveServer) -> None:
    """C082: chat has exactly k, completions k + 1."""
    red, z = live.token_id(" red"), ord("z")
    bias = {str(z): 100}  # chosen, although its raw logit is 0
    prompt = live.script("outside", [" red"])
    shown = live.complete(prompt=prompt, logprobs=2, max_tokens=1, logit_bias=bias)["choices"][0]
    assert shown["text"] == "z"
    assert shown["logprobs"]["token_logprobs"] == pytest.approx([OTHER])
    assert list(shown["logprobs"]["top_logprobs"][0]) == [" red", token_label(live.tokenizer, 0), "z"]
    messages = live.chat_script("outside", [red])
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "max_tokens": 1, "logit_bias": bias}
    content = live.post(CHAT, body).json()["choices"][0]["logprobs"]["content"][0]
    assert content["token"] == "z" and content["logprob"] == pytest.approx(OTHER)
    assert [t["token"] for t in content["top_logprobs"]] == [" red", "\x00"]


def test_echo(live: LiveServer) -> None:
    """C083: all arrays cover prompt and answer; offsets point into the text."""
    prompt = live.script("blue é one", ["Hello", *"👋".encode(), " red"])
    num_prompt = len(prompt.encode())
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 6}
    whole = live.complete(**body)["choices"][0]
    assert whole["text"] == prompt + "Hello👋 red"
    logprobs = whole["logprobs"]
    assert {len(v) for v in logprobs.values()} == {num_prompt + 6}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    expected = [len(prompt.encode()[:i].decode(errors="ignore")) for i in range(num_prompt)]
    assert logprobs["text_offset"][:num_prompt] == expected
    start = len(prompt)
    assert logprobs["text_offset"][num_prompt:] == [start, *[start + 5] * 4, start + 6]
    assert logprobs["tokens"][num_prompt + 1] == "bytes:\\xf0"
    frames = live.stream(COMPLETIONS, body)
    assert "".join(f["choices"][0]["text"] for f in frames) == whole["text"]
    assert joined(frames) == logprobs


def test_echo_of_several(live: LiveServer) -> None:
    first, second = live.script("echo 1", ["Hello"], ["END"]), live.script("echo 2", ["TU"], ["PQR"])
    answer = live.complete(prompt=[first, second], n=2, echo=True, logprobs=0, max_tokens=1)
    texts = [c["text"] for c in answer["choices"]]
    assert texts == ["echo 1Hello", "echo 1END", "echo 2TU", "echo 2PQR"]
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["tokens"]) == 7
        assert None not in choice["logprobs"]["token_logprobs"][1:]
    by_ids = live.complete(prompt=list(first.encode()), echo=True, max_tokens=1)
    assert by_ids["choices"][0]["text"] == "echo 1Hello"


def test_chat_stream_equals_whole(live: LiveServer) -> None:
    """C019: bytes of all tokens together are the UTF-8 of the text."""
    messages = live.chat_script("bytes", ["Hello", *"é👋".encode(), "<|im_end|>"])
    body = {"messages": messages, "logprobs": True, "top_logprobs": 1}
    whole = live.post(CHAT, body).json()["choices"][0]
    content = whole["logprobs"]["content"]
    raw = b"".join(bytes(c["bytes"]) for c in content if c["token"] != "<|im_end|>")
    assert raw.decode() == whole["message"]["content"] == "Helloé👋"
    frames = live.stream(CHAT, body)
    streamed = [c for f in frames for c in (f["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


def test_prompt_logprobs(live: LiveServer) -> None:
    """vLLM's field; null first, then one table per token."""
    answer = live.complete(prompt="abc", prompt_logprobs=1, max_tokens=1)
    tables = answer["choices"][0]["prompt_logprobs"]
    assert tables[0] is None and len(tables) == 3
    assert tables[1][str(ord("b"))]["decoded_token"] == "b"
    chat = live.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0, "max_tokens": 1})
    assert len(chat.json()["prompt_logprobs"]) == chat.json()["usage"]["prompt_tokens"]


def test_chunked_prefill_gives_the_same(live: LiveServer) -> None:
    """C085 at the HTTP side: repeated and echoed, the same array; P - 1 values."""
    body = {"prompt": "p" * 100, "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = live.complete(**body), live.complete(**body)
    assert first["choices"] == second["choices"]
    values = first["choices"][0]["logprobs"]["token_logprobs"]
    assert len(values) == 101 and values[0] is None and None not in values[1:]


def test_openai_client_reads_them(live: LiveServer) -> None:
    messages = live.chat_script("oa lp", ["Hello", "<|im_end|>"])
    chat = live.openai.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=3)  # type: ignore[arg-type]
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 3
    plain = live.openai.completions.create(model=MODEL, prompt="x", logprobs=3, max_tokens=2, echo=True)
    assert plain.choices[0].logprobs is not None and plain.choices[0].logprobs.tokens == ["x", "a", "a"]


def test_infinite_values(live: LiveServer) -> None:
    assert [finite(x) for x in (-math.inf, math.nan, -1.5, -1e6)] == [-9999.0, -9999.0, -1.5, -9999.0]
    entry = TokenLogprobs(65, -math.inf, 9, ((66, -0.5), (67, -math.inf)))
    chat = chat_logprobs(live.tokenizer, [entry])["content"][0]
    assert chat["logprob"] == -9999.0 and chat["top_logprobs"][1]["logprob"] == -9999.0
    builder = CompletionLogprobs(live.tokenizer, 0)
    builder.add([entry], "A")
    assert builder.take() == {
        "tokens": ["A"], "token_logprobs": [-9999.0], "text_offset": [0],
        "top_logprobs": [{"B": -0.5, "C": -9999.0, "A": -9999.0}],
    }  # fmt: skip
