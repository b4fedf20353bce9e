"""Structured output over HTTP, with the openai client and a script that would rather say something else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.live_server import MODEL, LiveServer, live_server

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
ROUTES = ("/v1/completions", "/v1/chat/completions")


def ask(live: LiveServer, **fields: Any) -> dict[str, Any]:
    return live.complete(**{"prompt": "unscripted", "max_tokens": 50, **fields})["choices"][0]  # type: ignore[no-any-return]


def test_completions_take_every_kind(live: LiveServer) -> None:
    """The script says "aaa…"; the lowest allowed byte is taken where the grammar forbids it."""
    for fields, text in (
        ({"structured_outputs": {"choice": ["cab", "dad"]}}, "cab"),
        ({"structured_outputs": {"regex": "b{2}a+c"}}, "bb" + "a" * 48),
        ({"structured_outputs": {"grammar": 'start: "x" ("a" | "b") "y"'}}, "xay"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}, "max_tokens": 6}, '{"a":-'),
        ({"structured_outputs": {"json": json.dumps({"enum": ["é"]})}}, '"é"'),
        ({"guided_choice": ["cab"]}, "cab"),
        ({"guided_regex": "[xy]a"}, "xa"),
        ({"guided_json": {"const": "é"}, "structured_outputs": None}, '"é"'),
        ({"guided_grammar": 'start: "q"'}, "q"),
        ({"response_format": {"type": "text"}, "max_tokens": 3}, "aaa"),
    ):
        choice = ask(live, **fields)
        assert choice["text"].replace(" ", "").replace("\n", "") == text, fields
        assert choice["finish_reason"] == ("length" if len(text.encode()) >= fields.get("max_tokens", 50) else "stop")


def test_scripted_json_through_the_openai_client(live: LiveServer) -> None:
    """C131, C133: complete is `stop`, cut is `length` and never repaired; the stream says the same."""
    answer = '{"a": 12}'
    messages: Any = live.chat_script("json please", [*answer.encode(), "<|im_end|>"])
    for fmt in (FORMAT, {"type": "json_object"}):
        full = live.openai.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, response_format=fmt, max_tokens=50
        )  # type: ignore[call-overload]
        assert full.choices[0].message.content == answer and full.choices[0].finish_reason == "stop"
        assert full.usage.completion_tokens == len(answer)  # the end needs no token
        for limit in range(1, len(answer) + 1):
            chunks = list(
                live.openai.chat.completions.create(
                    model=MODEL, messages=messages, temperature=0, response_format=fmt, max_tokens=limit, stream=True
                )  # type: ignore[call-overload]
            )
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == answer[:limit]
            assert chunks[-1].choices[0].finish_reason == ("stop" if limit == len(answer) else "length")


def test_endless_blanks_come_to_an_end(live: LiveServer) -> None:
    """C130: a model that wants nothing but blanks still completes its object."""
    schema = {**SCHEMA, "properties": {"a": {"type": "boolean"}}}
    fmt = {"type": "json_schema", "json_schema": {"name": "blanks", "schema": schema}}
    for blank in ("\n", " ", "\t"):
        prompt = live.script(f"blanks {blank!r}", [ord(blank)] * 300)
        choice = ask(live, prompt=prompt, response_format=fmt, max_tokens=200)
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["text"])) == {"a"}


def test_ends_before_min_tokens_and_despite_ignore_eos(live: LiveServer) -> None:
    choice = ask(live, structured_outputs={"choice": ["cab"]}, min_tokens=20, ignore_eos=True)
    assert choice["text"] == "cab" and choice["finish_reason"] == "stop"


def test_samples_prompts_logprobs_and_stop_strings(live: LiveServer) -> None:
    body = {
        "prompt": ["one", "two"],
        "n": 2,
        "logprobs": 1,
        "max_tokens": 9,
        "structured_outputs": {"regex": "cabbage"},
    }
    choices = live.complete(**body)["choices"]
    assert [c["text"] for c in choices] == ["cabbage"] * 4
    assert [len(c["logprobs"]["tokens"]) for c in choices] == [7] * 4
    assert ask(live, structured_outputs={"regex": "cabbage"}, stop="bb")["text"] == "ca"


BAD_FORMATS: list[Any] = [
    {},
    {"type": "xml"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {}},
    {"type": "json_schema", "json_schema": {"name": "x"}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "["}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1:1/"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": 3, "schema": {}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1.5}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "extra": 1}},
    {"type": "json_object", "schema": {}},
    {"type": 3},
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_formats_are_named(live: LiveServer, path: str, stream: bool) -> None:
    """C128: never an unconstrained 200."""
    what = {"prompt": "x"} if path == ROUTES[0] else {"messages": [{"role": "user", "content": "x"}]}
    for fmt in BAD_FORMATS:
        response = live.post(path, {**what, "response_format": fmt, "stream": stream, "max_tokens": 4})
        assert response.status_code == 400, (fmt, response.text)
        error = response.json()["error"]
        assert error["param"] == "response_format" and error["message"].startswith("response_format")
        assert len(response.content) < 1000
    live.check_idle_and_live()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"nope": 1}}, "structured_outputs"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: nope"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_bad_wishes_are_named(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    response = live.post(ROUTES[0], {"prompt": "x", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_one_bad_grammar_fails_one_request(live: LiveServer) -> None:
    live.model.gate.clear()
    running = live.send_raw("/v1/completions", {"prompt": "x", "max_tokens": 30})
    with pytest.raises(openai.BadRequestError, match="response_format"):
        live.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], response_format=BAD_FORMATS[5]
        )
    live.model.gate.set()
    with running:
        assert b"200 OK" in running.recv(100)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("tokenizer"), max_num_seqs=2, num_blocks=24) as live:
        yield live


def test_preempted_and_crowded_answers_are_the_same(narrow: LiveServer) -> None:
    """Law 1 over HTTP: more requests than places, blocks for two of them only."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 120, "structured_outputs": {"regex": "(ab|ac|d){60}"}}
    alone = ask(narrow, **body)["text"]
    assert len(alone) == 60 * 2

    async def all_at_once() -> list[httpx.Response]:
        import asyncio

        async with httpx.AsyncClient(timeout=20) as http:
            posts = [
                http.post(f"{narrow.url}/v1/completions", json={**body, "prompt": f"{'x' * 20 * i} unscripted"})
                for i in range(6)
            ]
            return await asyncio.gather(*posts)

    import asyncio

    for response in asyncio.run(all_at_once()):
        assert response.json()["choices"][0]["text"] == alone
