"""n and best_of over HTTP: ranking, what usage counts, what cannot be streamed (C068, C089)."""

from __future__ import annotations

from typing import Any

import pytest
from support.live_server import LiveServer

ROUTES = ("/v1/completions", "/v1/chat/completions")


def rank_script(live: LiveServer, prompt: str) -> str:
    """Four samples; a None is a token of low probability (all logits equal) instead of a forced one."""
    b, c = ord("b"), ord("c")
    samples: list[list[Any]] = [[None, b, b], [b, b, b], [None, None, b], [c, c, c]]
    live.model.table[tuple(live.tokenizer.encode(prompt))] = samples
    return prompt


def test_best_of_keeps_the_most_probable_per_token(live: LiveServer) -> None:
    prompt = rank_script(live, "rank me")
    answer = live.complete(prompt=prompt, n=2, best_of=4, max_tokens=3, temperature=1)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "bbb"), (1, "ccc")]
    assert [c["logprobs"] for c in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 12  # all that was drawn
    shown = live.complete(prompt=prompt, n=3, best_of=4, max_tokens=3, temperature=1, logprobs=0)
    means = [sum(c["logprobs"]["token_logprobs"]) / 3 for c in shown["choices"]]
    assert means == sorted(means, reverse=True)
    assert shown["choices"][2]["text"] == "\0bb"
    two = live.complete(prompt=[prompt, prompt], n=1, best_of=4, max_tokens=3, temperature=1)
    assert [(c["index"], c["text"]) for c in two["choices"]] == [(0, "bbb"), (1, "bbb")]
    live.check_idle_and_live()


def test_best_of_in_chat(live: LiveServer) -> None:
    messages = live.chat_script("best of", "abc", "abc", "abc")
    body = {"messages": messages, "n": 1, "best_of": 3, "max_tokens": 3, "temperature": 1}
    answer = live.post(ROUTES[1], body).json()
    assert [c["index"] for c in answer["choices"]] == [0]
    assert answer["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("path", ROUTES)
def test_best_of_above_n_cannot_be_streamed(live: LiveServer, path: str) -> None:
    body: dict[str, Any] = {"prompt": "x"} if path == ROUTES[0] else {"messages": [{"role": "user", "content": "x"}]}
    refused = live.post(path, {**body, "n": 2, "best_of": 4, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")
    frames = live.stream(path, {**body, "n": 2, "best_of": 2, "max_tokens": 3})
    assert {c["index"] for f in frames for c in f["choices"]} == {0, 1}


def test_usage_tells_what_was_shared(live: LiveServer) -> None:
    """C089 over HTTP: 100 prompt tokens, n = 4."""
    before = live.metric("octavo_prompt_tokens_shared_total")
    answer = live.complete(prompt="s" + "p" * 99, n=4, max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == 100
    assert answer["usage"]["prompt_tokens_details"]["shared_tokens"] == 300
    assert live.metric("octavo_prompt_tokens_shared_total") - before == 300
    one = live.complete(prompt="s" + "p" * 99, max_tokens=2)
    assert "shared_tokens" not in one["usage"]["prompt_tokens_details"]
