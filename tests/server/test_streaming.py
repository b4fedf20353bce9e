"""What is streamed equals what is not (B, C043, C044, C046, C088), and text survives odd bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.live_server import LiveServer, live_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def collect(frames: list[dict[str, Any]]) -> dict[int, tuple[str, str | None]]:
    """Text and finish reason per index; exactly one finish each."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for choice in (c for f in frames for c in f["choices"]):
        index = choice["index"]
        assert index not in ends, "news of a choice after its end"
        piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[index] = texts.get(index, "") + piece
        if choice["finish_reason"] is not None:
            ends[index] = choice["finish_reason"]
    return {i: (texts[i], ends.get(i)) for i in sorted(texts)}


def both_ways(live: LiveServer, path: str, body: dict[str, Any]) -> dict[int, tuple[str, str | None]]:
    """STREAM=FULL: the answer, after checking that the stream and its usage give the same."""
    response = live.post(path, body)
    assert response.status_code == 200, response.text
    whole = response.json()
    frames = live.stream(path, {**body, "stream_options": {"include_usage": True}})
    *chunks, usage = frames
    assert usage["choices"] == [] and all(c["usage"] is None for c in chunks)
    for counts in (usage["usage"], whole["usage"]):
        counts.pop("prompt_tokens_details")
    assert usage["usage"] == whole["usage"]
    answer = {
        c["index"]: (c["text"] if "text" in c else c["message"]["content"], c["finish_reason"])
        for c in whole["choices"]
    }
    assert collect(chunks) == answer
    return answer


def test_emoji_over_four_tokens(live: LiveServer) -> None:
    """C022: the raw body holds no lone surrogate, whole or streamed."""
    prompt = live.script("emoji", [*"👋".encode(), "END", "<|im_end|>"])
    assert both_ways(live, COMPLETIONS, {"prompt": prompt, "max_tokens": 9}) == {0: ("👋END", "stop")}
    raw = live.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 9}).content
    assert "👋".encode() in raw or b"\\ud83d\\udc4b" in raw.lower()


def test_invalid_bytes(live: LiveServer) -> None:
    """C023, C016: no crash, U+FFFD, the same in both modes."""
    prompt = live.script("bad bytes", [0xFF, 0xFE, 0x5C])
    assert both_ways(live, COMPLETIONS, {"prompt": prompt, "max_tokens": 3}) == {0: ("\ufffd\ufffd\\", "length")}
    prompt = live.script("cut", [ord("a"), 0xF0, 0x9F])
    assert both_ways(live, COMPLETIONS, {"prompt": prompt, "max_tokens": 3}) == {0: ("a\ufffd", "length")}
    live.check_idle_and_live()


def test_stop_string_over_tokens(live: LiveServer) -> None:
    """C001, C002: nothing of a stop string leaks; what was held back in vain comes out."""
    prompt = live.script("stops", ["mno", "PQR", ord("S"), "TU", ord("V"), ord("w")])
    body = {"prompt": prompt, "max_tokens": 20, "stop": ["PQRSTUV"]}
    assert both_ways(live, COMPLETIONS, body) == {0: ("mno", "stop")}
    assert not any("P" in c["text"] for f in live.stream(COMPLETIONS, body) for c in f["choices"])
    whole = live.complete(**body)
    assert whole["usage"]["completion_tokens"] == 5 and whole["choices"][0]["stop_reason"] == "PQRSTUV"
    kept = {**body, "include_stop_str_in_output": True}
    assert both_ways(live, COMPLETIONS, kept) == {0: ("mnoPQRSTUV", "stop")}
    prompt = live.script("vain", [" red", " green", " blue", "<|im_end|>"])
    for limit, reason in ((9, "stop"), (3, "length")):
        body = {"prompt": prompt, "max_tokens": limit, "stop": ["blue\n#end"]}
        assert both_ways(live, COMPLETIONS, body) == {0: (" red green blue", reason)}


def test_special_tokens(live: LiveServer) -> None:
    """C013, C020."""
    stop = live.token_id("<|im_end|>")
    prompt = live.script("special", ["Hello", "<|im_start|>", "END", "<|im_end|>"])
    body = {"prompt": prompt, "max_tokens": 9}
    assert both_ways(live, COMPLETIONS, body) == {0: ("HelloEND", "stop")}
    shown = {**body, "skip_special_tokens": False}
    assert both_ways(live, COMPLETIONS, shown) == {0: ("Hello<|im_start|>END", "stop")}
    wanted = {**shown, "stop_token_ids": [stop], "include_stop_str_in_output": True, "ignore_eos": True}
    assert both_ways(live, COMPLETIONS, wanted) == {0: ("Hello<|im_start|>END<|im_end|>", "stop")}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_samples_end_apart(live: LiveServer, path: str) -> None:
    """C088: indices are right, each choice has one role and one end, [DONE] comes after all."""
    samples = (["Hello", "<|im_end|>"], [" red"] * 5 + ["<|im_end|>"], [" blue"] * 6)
    body: dict[str, Any] = {"n": 3, "max_tokens": 6, "temperature": 1}
    if path == CHAT:
        body["messages"] = live.chat_script("three samples", *samples)
    else:
        body["prompt"] = live.script("three samples", *samples)
    assert both_ways(live, path, body) == {
        0: ("Hello", "stop"),
        1: (" red" * 5, "stop"),
        2: (" blue" * 6, "length"),
    }
    frames = live.stream(path, body)
    if path == CHAT:
        roles = [c["index"] for f in frames for c in f["choices"] if "role" in c["delta"]]
        assert sorted(roles) == [0, 1, 2]
        first = {}
        for f in frames:
            for c in f["choices"]:
                first.setdefault(c["index"], c)
        assert all("role" in c["delta"] for c in first.values())


def test_many_prompts(live: LiveServer) -> None:
    """C043: prompts are counted once whatever n, choices are numbered prompt by prompt."""
    first = live.script("a b", ["Hello"] * 4, ["PQR"] * 4, ["TU"] * 4)
    second = live.script("c", ["END"] * 4, ["mno"] * 4, [" one"] * 4)
    body = {"prompt": [first, second], "n": 3, "max_tokens": 4, "ignore_eos": True}
    texts = [t * 4 for t in ("Hello", "PQR", "TU", "END", "mno", " one")]
    assert both_ways(live, COMPLETIONS, body) == {i: (t, "length") for i, t in enumerate(texts)}
    usage = live.complete(**body)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 24, 28)
    ids = [list(first.encode()), list(second.encode())]
    assert both_ways(live, COMPLETIONS, {**body, "prompt": ids}) == {i: (t, "length") for i, t in enumerate(texts)}


def test_errors_before_the_stream_have_a_status(live: LiveServer) -> None:
    """C044 (a)."""
    for body in ({"prompt": "x" * 300}, {"prompt": [[1], [999]]}, {"prompt": "x", "top_p": 3}):
        response = live.post(COMPLETIONS, {**body, "stream": True})
        assert response.status_code == 400 and "error" in response.json()
        assert response.headers["content-type"] == "application/json"


def test_failure_of_the_first_step_has_a_status(live: LiveServer) -> None:
    live.model.row_error = lambda row: "NaN in the logits"
    for stream in (False, True):
        response = live.post(COMPLETIONS, {"prompt": "fails at once", "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "NaN in the logits"
        assert response.json()["error"]["type"] == "server_error"


def test_failure_in_the_stream(live: LiveServer) -> None:
    """C044 (b): an error frame, then [DONE], and no finish reason."""
    prompt = "fails at token 3"
    live.model.row_error = lambda row: "NaN in the logits" if row.start == len(prompt) + 2 else None
    frames = live.stream(COMPLETIONS, {"prompt": prompt, "max_tokens": 9})
    assert frames[-1]["error"]["message"] == "NaN in the logits"
    assert collect(frames[:-1]) == {0: ("aaa", None)}
    live.model.row_error = None
    live.check_idle_and_live()


def test_keep_alive(tmp_path: Path) -> None:
    """C046: comments while nothing happens; clients see the same content."""
    with live_server(tmp_path, settings={"sse_keep_alive": 0.02}) as live:
        live.model.gate.clear()
        with live.http.stream(
            "POST",
            live.url + COMPLETIONS,
            content=json.dumps({"model": "org/tiny:v1.0", "prompt": "x", "max_tokens": 3, "stream": True}),
        ) as response:
            lines = response.iter_lines()
            comments = [next(lines) for _ in range(4)]
            assert comments == [": keep-alive", ""] * 2
            live.model.gate.set()
            data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert collect(data) == {0: ("aaa", "length")}
        assert [c.choices[0].text for c in live.openai.completions.create(
            model="org/tiny:v1.0", prompt="x", max_tokens=1, stream=True)] == ["a"]  # fmt: skip
