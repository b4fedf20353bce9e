"""Limits and validation of values (E): the answer is exact, or a 400 that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.live_server import MODEL, LiveServer, live_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
L = 256  # max_model_len of the shared server
V = 268  # bytes, ten pieces, two special tokens


def refused(live: LiveServer, body: dict[str, Any], param: str, path: str = COMPLETIONS) -> dict[str, Any]:
    response = live.post(path, body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["param"] == param, error
    return error


def test_max_tokens(live: LiveServer) -> None:
    """C055, C056: defaults, precedence, clamping."""
    assert live.complete(prompt="x")["usage"]["completion_tokens"] == 16
    assert live.complete(prompt="x", max_tokens=None)["usage"]["completion_tokens"] == 16
    prompt = "x" * (L - 24)
    for asked in (24, 25, 10**9, 2**63, 10**30):
        answer = live.complete(prompt=prompt, max_tokens=asked)
        assert answer["usage"]["completion_tokens"] == 24
        assert answer["choices"][0]["finish_reason"] == "length"
    messages = [{"role": "user", "content": "x"}]
    for fields, expected in (
        ({}, None), ({"max_tokens": None}, None), ({"max_tokens": 3}, 3), ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
    ):  # fmt: skip
        usage = live.post(CHAT, {"messages": messages, **fields}).json()["usage"]
        assert usage["completion_tokens"] == (expected or L - usage["prompt_tokens"])
    refused(live, {"messages": messages, "max_tokens": 0}, "max_tokens", CHAT)
    refused(live, {"messages": messages, "max_completion_tokens": 0}, "max_completion_tokens", CHAT)
    refused(live, {"prompt": "x", "max_tokens": -1}, "max_tokens")


def test_scoring_only(live: LiveServer) -> None:
    """C053: max_tokens 0 generates nothing."""
    scored = live.complete(prompt="a b c", max_tokens=0, echo=True, logprobs=1)
    choice = scored["choices"][0]
    assert choice["text"] == "a b c" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 5
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(isinstance(x, float) for x in choice["logprobs"]["token_logprobs"][1:])
    assert scored["usage"]["completion_tokens"] == 0
    silent = live.complete(prompt="a b c", max_tokens=0)
    assert silent["choices"][0]["text"] == "" and silent["choices"][0]["finish_reason"] == "length"
    frames = live.stream(COMPLETIONS, {"prompt": "a b c", "max_tokens": 0, "echo": True})
    assert "".join(f["choices"][0]["text"] for f in frames) == "a b c"


def test_context_length(live: LiveServer) -> None:
    """C058, C059: both numbers are named; L - 1 leaves room for one token."""
    for size in (L, L + 1, 10 * L):
        error = refused(live, {"prompt": "x" * size, "max_tokens": 1}, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert str(size) in error["message"] and str(L) in error["message"]
    refused(live, {"prompt": ["fine", "x" * L]}, "prompt")
    big = live.post(COMPLETIONS, {"prompt": "word " * 400_000, "stream": True})
    assert big.status_code == 400 and big.json()["error"]["code"] == "context_length_exceeded"
    last = live.complete(prompt="x" * (L - 1), max_tokens=5)
    assert last["usage"]["completion_tokens"] == 1 and last["choices"][0]["finish_reason"] == "length"
    live.check_idle_and_live()


def test_empty_prompts(live: LiveServer) -> None:
    """C061: this tokenizer adds no BOS, so nothing stays nothing."""
    for prompt in ("", [""], [], [[]], None, ["a", ""], [[1], []]):
        refused(live, {"prompt": prompt}, "prompt")
    refused(live, {}, "prompt")
    refused(live, {"messages": []}, "messages", CHAT)
    refused(live, {}, "messages", CHAT)


def test_token_ids_out_of_range(live: LiveServer) -> None:
    """C062."""
    for prompt in ([[V]], [2**31], [10**20], [-1], [1.0], [True], [None], [[1], "a"], [1, [2]]):
        refused(live, {"prompt": prompt}, "prompt")
    assert live.complete(prompt=[V - 1], max_tokens=1)["usage"]["prompt_tokens"] == 1
    live.check_idle_and_live()


def test_logit_bias(live: LiveServer) -> None:
    """C064, C065; and it works."""
    for key in ("abc", "1.5", " 5", "-3", "1_0", "५", "", "9" * 30, str(V), "99999999"):
        refused(live, {"prompt": "x", "logit_bias": {key: 1}}, "logit_bias")
    for value in ("x", None, 101, -101):
        refused(live, {"prompt": "x", "logit_bias": {"5": value}}, "logit_bias")
    refused(live, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias")
    assert live.complete(prompt="x", logit_bias={str(ord("z")): 100}, max_tokens=2)["choices"][0]["text"] == "zz"


def test_large_counts(live: LiveServer) -> None:
    """C067, C005, C008."""
    for n in (0, 129, 10**6, -1):
        refused(live, {"prompt": "x", "n": n}, "n")
    refused(live, {"prompt": ["x"] * 100_000}, "prompt")
    refused(live, {"prompt": ["x"] * 20, "n": 128}, "n")
    refused(live, {"prompt": "x", "best_of": 10**6}, "best_of")
    for stop in ("", [""], ["", "END"], [f"x{i}" for i in range(17)], ["x"] * 500_000):
        refused(live, {"prompt": "x", "stop": stop}, "stop")
    assert live.complete(prompt="x", stop=[], max_tokens=2)["choices"][0]["text"] == "aa"
    refused(live, {"prompt": "x", "stop_token_ids": [10**20]}, "stop_token_ids")
    refused(live, {"prompt": "x", "stop_token_ids": [V]}, "stop_token_ids")
    refused(live, {"prompt": "x", "priority": 2**40}, "priority")
    refused(live, {"prompt": "x", "cache_salt": "s" * 257}, "cache_salt")
    refused(live, {"prompt": "x", "logprobs": 21}, "logprobs")
    refused(live, {"prompt": "x", "top_k": 10**20}, "top_k")
    refused(live, {"prompt": "x", "min_tokens": 10**20}, "min_tokens")
    refused(live, {"prompt": "x", "seed": 10**30}, "seed")


def test_truncation_is_asked_for_and_told(live: LiveServer) -> None:
    """C070."""
    prompt = live.script("tail", ["Paris", "<|im_end|>"])
    cut = live.complete(prompt="x" * 500 + prompt, truncate_prompt_tokens=4, echo=True)
    assert cut["choices"][0]["text"] == "tailParis"
    assert cut["usage"]["prompt_tokens"] == 4
    assert cut["usage"]["prompt_tokens_details"]["truncated_tokens"] == 500
    whole = live.complete(prompt="x" * 500, truncate_prompt_tokens=-1)
    assert whole["usage"]["prompt_tokens"] == L - 1
    for odd in (0, -2, 10**20):
        refused(live, {"prompt": "x", "truncate_prompt_tokens": odd}, "truncate_prompt_tokens")


def test_cached_tokens(live: LiveServer) -> None:
    """C100: all but the last token; the same when streamed; a salt separates."""
    prompt = "~cached" * 8  # 56 tokens; nothing else here begins with a tilde
    usages = [live.complete(prompt=prompt, max_tokens=2)["usage"] for _ in range(2)]
    assert [u["prompt_tokens_details"]["cached_tokens"] for u in usages] == [0, 55]
    frames = live.stream(COMPLETIONS, {"prompt": prompt, "stream_options": {"include_usage": True}})
    assert frames[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 55
    twice = live.complete(prompt=[prompt, prompt], n=2, max_tokens=2)["usage"]
    assert twice["prompt_tokens_details"]["cached_tokens"] == 110
    salted = live.complete(prompt=prompt, cache_salt="tenant")["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_messages(live: LiveServer) -> None:
    """C026, C034: what the template or the shape of a message refuses is a 400 with its words, streamed or not."""
    for messages in (
        [{"role": "user", "content": None}],
        [{"content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
    ):
        for stream in (False, True):
            response = live.post(CHAT, {"messages": messages, "stream": stream})
            assert response.status_code == 400 and "messages" in response.json()["error"]["param"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert live.post(CHAT, {"messages": parts, "max_tokens": 1}).status_code == 200


def test_chat_prefill(live: LiveServer) -> None:
    """C028: the last turn is continued; only the continuation comes back."""
    messages = [{"role": "user", "content": "Say abc"}, {"role": "assistant", "content": "ab"}]
    prompt = "<|im_start|>user\nSay abc<|im_end|>\n<|im_start|>assistant\nab"
    live.script(prompt, [ord("c"), "<|im_end|>"])
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    answer = live.post(CHAT, body).json()
    assert answer["choices"][0]["message"]["content"] == "c"
    assert answer["usage"]["prompt_tokens"] == len(live.tokenizer.encode(prompt))


def test_no_chat_template(tmp_path: Path) -> None:
    """C031."""
    with live_server(tmp_path, chat_template=None) as live:
        response = live.post(CHAT, {"messages": [{"role": "user", "content": "x"}]})
        assert response.status_code == 400 and "template" in response.json()["error"]["message"]
        assert live.complete(prompt="x", max_tokens=1)["model"] == MODEL


def test_never_fits(tmp_path: Path) -> None:
    """C112: the pool of 4 blocks can never hold it; told at once, with the arithmetic."""
    with live_server(tmp_path, num_blocks=4) as live:
        error = refused(live, {"prompt": "x" * 70, "max_tokens": 100}, "prompt")
        assert error["code"] == "kv_cache_exceeded" and "blocks" in error["message"]
        live.check_idle_and_live()


def test_presets_of_the_model(tmp_path: Path) -> None:
    """The model's generation_config gives defaults; the request wins."""
    from octavo.server.schema import CompletionBody, sampling_params
    from octavo.server.serve import sampling_presets

    presets = sampling_presets({"temperature": 0.6, "top_p": 0.9, "top_k": -7, "do_sample": True, "min_p": None})
    assert presets == {"temperature": 0.6, "top_p": 0.9}
    params = sampling_params(CompletionBody(top_p=0.5), presets)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 0)
    plain = sampling_params(CompletionBody(), {})
    assert (plain.temperature, plain.top_p, plain.max_tokens) == (1.0, 1.0, 16)


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_penalties_reach_the_engine(field: str) -> None:
    from octavo.server.schema import ChatBody, sampling_params

    params = sampling_params(ChatBody(**{field: 1.5}, repetition_penalty=1.2, seed=-1, min_p=0.1), {})
    assert getattr(params, field) == 1.5 and params.repetition_penalty == 1.2 and params.min_p == 0.1
