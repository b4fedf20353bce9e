"""Beam search over HTTP: results, scores, streams, special tokens, usage (C020, C092, C095)."""

from __future__ import annotations

from typing import Any

import pytest
from support.live_server import LiveServer

ROUTES = ("/v1/completions", "/v1/chat/completions")


def beams(**fields: Any) -> dict[str, Any]:
    return {"use_beam_search": True, "n": 3, "max_tokens": 4, **fields}


def body_of(path: str, live: LiveServer, tokens: list[Any]) -> dict[str, Any]:
    if path == ROUTES[0]:
        return {"prompt": live.script("beams", tokens)}
    return {"messages": live.chat_script("beams", tokens)}


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", ROUTES)
def test_results_with_scores(live: LiveServer, path: str) -> None:
    body = {**body_of(path, live, ["P", "Q", "R", "S"]), **beams(length_penalty=2.0, early_stopping="never")}
    answer = live.post(path, body).json()
    choices = answer["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert text_of(choices[0]) == "PQRS"
    scores = [c["score"] for c in choices]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(0.0, abs=1e-6)
    assert {c["finish_reason"] for c in choices} == {"length"}
    assert {str(c["logprobs"]) for c in choices} == {"None"}
    assert answer["usage"]["completion_tokens"] == 12
    live.check_idle_and_live()


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_brings_the_settled_answer(live: LiveServer, path: str) -> None:
    body = {**body_of(path, live, ["mno", "PQR", " red", "<|im_end|>"]), **beams(n=2)}
    whole = live.post(path, body).json()
    frames = live.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert frames[-1]["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": frames[-1]["usage"]["prompt_tokens_details"],
    }
    for choice in whole["choices"]:
        parts = [c for f in frames for c in f["choices"] if c["index"] == choice["index"]]
        text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in parts)
        assert text == text_of(choice)
        assert [c["finish_reason"] for c in parts if c["finish_reason"]] == [choice["finish_reason"]]
        assert [c["score"] for c in parts if "score" in c] == [choice["score"]]


@pytest.mark.parametrize(("skip", "text"), [(None, "Hi"), (False, "H<|im_start|>i")])
def test_special_tokens_on_the_beam_path(live: LiveServer, skip: bool | None, text: str) -> None:
    """C020."""
    prompt = live.script("special", ["H", "<|im_start|>", "i", "<|im_end|>"])
    answer = live.complete(prompt=prompt, skip_special_tokens=skip, **beams())
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")


def test_logprobs_beside_a_search(live: LiveServer) -> None:
    """C095: the candidates of the search and the logprobs that a client wants do not get in each other's way."""
    answer = live.complete(prompt=live.script("lp", ["P", "Q"]), logprobs=1, **beams(max_tokens=2))
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["token_logprobs"]) == 2
        assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
        assert choice["score"] == pytest.approx(sum(choice["logprobs"]["token_logprobs"]) / 2)


def test_width_beyond_the_results(live: LiveServer) -> None:
    prompt = live.script("wide", ["P", "Q", "R", "S"])
    answer = live.complete(prompt=prompt, **beams(n=1, best_of=5))
    assert [c["text"] for c in answer["choices"]] == ["PQRS"]
    assert answer["usage"]["completion_tokens"] == 4
    two = live.complete(prompt=[prompt, prompt], **beams(n=2, best_of=4))
    assert [c["index"] for c in two["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in two["choices"]][::2] == ["PQRS", "PQRS"]


def test_width_one_is_greedy(live: LiveServer) -> None:
    prompt = live.script("one", ["P", "Q", "R", "S"])
    assert live.complete(prompt=prompt, **beams(n=1))["choices"][0]["text"] == "PQRS"
