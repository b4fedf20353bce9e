"""Tool calling and thoughts over HTTP, with the openai client and scripted models (C025, C136, C137, C139)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.answers import TOOL_TEMPLATE
from support.live_server import MODEL, TEMPLATE, LiveServer, live_server

from octavo.text.chat import render_chat

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Bern", "Zug"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("tools"), chat_template=TOOL_TEMPLATE, max_model_len=1024) as live:
        yield live


def script(live: LiveServer, question: str, answer: str, tools: Any = TOOLS, template: str = TOOL_TEMPLATE) -> Any:
    """From now on the question, asked with these tools, is answered so."""
    messages = [{"role": "user", "content": question}]
    key = tuple(render_chat(live.tokenizer, messages, tools=tools, chat_template=template))
    live.model.table[key] = [[*answer.encode(), live.token_id("<|im_end|>")]]
    return messages


def full(live: LiveServer, messages: Any, **fields: Any) -> Any:
    fields = {"tools": TOOLS, "max_tokens": 300, **fields}
    answer = live.openai.chat.completions.create(model=MODEL, messages=messages, temperature=0, **fields)
    return answer.choices[0]


def streamed(live: LiveServer, messages: Any, **fields: Any) -> tuple[str, str, list[dict[str, str]], str | None]:
    """(thoughts, content, calls, finish reason), and the shape of the deltas is checked on the way."""
    fields = {"tools": TOOLS, "max_tokens": 300, **fields}
    thoughts, content, reason = "", "", None
    calls: list[dict[str, str]] = []
    for chunk in live.openai.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, stream=True, **fields
    ):
        (choice,) = chunk.choices
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls) and call.type == "function" and call.function.name
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            else:
                assert call.function.name is None and call.type is None
            calls[call.index]["arguments"] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return thoughts, content, calls, reason


def same(live: LiveServer, messages: Any, **fields: Any) -> tuple[Any, list[tuple[str, str]], str]:
    """STREAM=FULL; returns (content, calls, finish reason)."""
    choice = full(live, messages, **fields)
    thoughts, content, calls, reason = streamed(live, messages, **fields)
    whole = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    assert whole == [(c["name"], c["arguments"]) for c in calls]
    assert len({c["id"] for c in calls}) == len(calls)
    assert (choice.message.content or "") == content and choice.finish_reason == reason
    assert (getattr(choice.message, "reasoning_content", None) or "") == thoughts
    return choice.message.content, whole, choice.finish_reason


WEATHER = ("get_weather", '{"city": "Bern"}')


def test_auto(server: LiveServer) -> None:
    """C136: the model decides; text before a call stays content, blanks around it go."""
    assert same(server, script(server, "q1", CALL)) == (None, [WEATHER], "tool_calls")
    assert same(server, script(server, "q2", f"Let me see.\n{CALL}{SECOND}")) == (
        "Let me see.", [WEATHER, ("now", "{}")], "tool_calls",
    )  # fmt: skip
    assert same(server, script(server, "q3", "Just text.")) == ("Just text.", [], "stop")
    other = CALL.replace("get_weather", "unknown")
    assert same(server, script(server, "q4", other)) == (other, [], "stop")


def test_none(server: LiveServer) -> None:
    """C136: no calls, and the model is not told of the tools."""
    messages = script(server, "q5", CALL, tools=None)
    assert same(server, messages, tool_choice="none") == (CALL, [], "stop")


def test_required_and_named_are_enforced(server: LiveServer) -> None:
    """C136: the script would rather talk. OpenAI's table: `tool_calls` when required, `stop` when named."""
    for question, answer in (("q6", "No calls from me!"), ("q7", CALL), ("q8", CALL + SECOND)):
        messages = script(server, question, answer)
        _, calls, reason = same(server, messages, tool_choice="required", parallel_tool_calls=False)
        assert reason == "tool_calls" and len(calls) == 1
        assert calls[0][0] in ("get_weather", "now") and isinstance(json.loads(calls[0][1]), dict)
        named = {"type": "function", "function": {"name": "get_weather"}}
        content, calls, reason = same(server, messages, tool_choice=named)
        assert content is None and reason == "stop"
        assert [c[0] for c in calls] == ["get_weather"] and json.loads(calls[0][1])["city"] in ("Bern", "Zug")
    messages = script(server, "q9", CALL + SECOND)
    assert same(server, messages, tool_choice="required")[1:] == ([WEATHER, ("now", "{}")], "tool_calls")


@pytest.mark.parametrize("fmt", ["hermes", "llama3_json", "mistral", "json"])
def test_every_format_is_enforced_and_read(tmp_path_factory: pytest.TempPathFactory, fmt: str) -> None:
    with live_server(
        tmp_path_factory.mktemp(fmt),
        settings={"tool_call_parser": fmt},
        chat_template=TOOL_TEMPLATE,
        max_model_len=1024,
    ) as live:
        messages = script(live, "q", "I would rather not.")
        for choice in ("required", {"type": "function", "function": {"name": "now"}}):
            content, calls, reason = same(live, messages, tool_choice=choice, parallel_tool_calls=False)
            assert content is None and len(calls) == 1 and json.loads(calls[0][1]) is not None
            assert reason == ("tool_calls" if choice == "required" else "stop")


MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")


@pytest.mark.parametrize("template", ["", "[TOOL_CALLS]", "[TOOL_CALLS][ARGS]"])
def test_marks_that_are_special_tokens(tmp_path_factory: pytest.TempPathFactory, template: str) -> None:
    """They are no text to the grammar, and the decoder would drop them."""
    written = TOOL_TEMPLATE if not template else TOOL_TEMPLATE.replace("<tool_call>", template)
    written += "{# <think> #}"
    with live_server(
        tmp_path_factory.mktemp("special"), chat_template=written, specials=MARKS, max_model_len=1024
    ) as live:
        named = {"type": "function", "function": {"name": "get_weather"}}
        messages = script(live, "q", "no", template=written)
        content, calls, reason = same(live, messages, tool_choice=named)
        assert content is None and [c[0] for c in calls] == ["get_weather"] and reason == "stop"
        call = {"": CALL, "[TOOL_CALLS]": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern"}}]',
                "[TOOL_CALLS][ARGS]": '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}'}[template]  # fmt: skip
        messages = script(live, "r", "", template=written)
        ids = live.tokenizer.encode(f"<think>hm</think>{call}", add_special_tokens=False)
        assert len(ids) < len(call)
        key = tuple(render_chat(live.tokenizer, messages, tools=TOOLS, chat_template=written))
        live.model.table[key] = [[*ids, live.token_id("<|im_end|>")]]
        for choice in ("auto", "required"):
            assert same(live, messages, tool_choice=choice, parallel_tool_calls=False) == (
                None,
                [WEATHER],
                "tool_calls",
            )
            assert full(live, messages, tool_choice=choice).message.reasoning_content == "hm"


def test_cut_by_the_limit(server: LiveServer) -> None:
    """C137: `length` wherever the limit cut a call, `tool_calls` only with complete arguments."""
    messages = script(server, "q10", CALL)
    length = len(CALL.encode())
    for limit in range(1, length + 2):
        _, calls, reason = same(server, messages, max_tokens=limit)
        if limit <= length:
            assert reason == "length"
        else:
            assert reason == "tool_calls" and calls == [WEATHER]
        for _, arguments in calls:
            assert WEATHER[1].startswith(arguments)
    broken = CALL.replace('"Bern"}', '"Bern",}')
    _, calls, reason = same(server, script(server, "q11", broken))
    assert reason == "stop" and calls[0][0] == "get_weather"


def test_tools_beside_a_response_format(server: LiveServer) -> None:
    """Either the form or a call; a call that must be made goes before the form."""
    fmt = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    assert same(server, script(server, "q12", CALL), response_format=fmt) == (None, [WEATHER], "tool_calls")
    assert same(server, script(server, "q13", '"yes"'), response_format=fmt) == ('"yes"', [], "stop")
    assert same(server, script(server, "q14", "prose"), response_format=fmt)[0] in ('"yes"', None)
    _, calls, _ = same(server, script(server, "q15", '"yes"'), response_format=fmt, tool_choice="required")
    assert calls


def test_samples_have_their_own_calls(server: LiveServer) -> None:
    messages = script(server, "q16", CALL)
    key = tuple(render_chat(server.tokenizer, messages, tools=TOOLS, chat_template=TOOL_TEMPLATE))
    server.model.table[key] = [[*text.encode(), server.token_id("<|im_end|>")] for text in (CALL, "text")]
    answer = server.openai.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, n=2, max_tokens=300)
    assert [c.finish_reason for c in answer.choices] == ["tool_calls", "stop"]
    assert [c.message.content for c in answer.choices] == [None, "text"]


def test_a_whole_conversation(server: LiveServer) -> None:
    """The call goes back into the history with its result, as clients send it."""
    messages = script(server, "q17", CALL)
    message = full(server, messages).message
    history: Any = [
        *messages,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "12 °C"}]},
    ]
    key = tuple(render_chat(server.tokenizer, history, tools=TOOLS, chat_template=TOOL_TEMPLATE))
    assert b"get_weather" in server.tokenizer.decode(key).encode()
    server.model.table[key] = [[*b"Cold.", server.token_id("<|im_end|>")]]
    assert same(server, history) == ("Cold.", [], "stop")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tools": ["x"]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 3}}]}, "tools"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(257)]}, "tools"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_tools_are_named(server: LiveServer, fields: dict[str, Any], param: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 5, "stream": stream}
    response = server.post("/v1/chat/completions", {**body, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param and len(response.content) < 1000


def test_good_tools_are_taken(server: LiveServer) -> None:
    for fields in (
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": f"f{i}", "strict": True}} for i in range(5)]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
    ):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **fields}
        assert server.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    "history",
    [
        [
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}],
            }
        ],
        [{"role": "tool", "content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "unknown"}],
        [
            {
                "role": "tool",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "tool_call_id": "1",
            }
        ],
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        [{"role": "assistant", "tool_calls": "x"}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
    ],
)
def test_odd_histories_are_never_a_500(server: LiveServer, history: list[dict[str, Any]]) -> None:
    """C139."""
    body = {"messages": [{"role": "user", "content": "x"}, *history], "tools": TOOLS, "max_tokens": 3}
    assert server.post("/v1/chat/completions", body).status_code in (200, 400)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("plain"), max_model_len=1024) as live:
        yield live


def test_template_without_tools_is_told_in_words(plain: LiveServer) -> None:
    live = plain
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "weather?"}]
    seen: list[str] = []
    live.model.row_error = lambda row: seen.append(live.tokenizer.decode(row.token_ids)) or None  # type: ignore[func-returns-value]
    choice = full(live, messages, max_tokens=80, tools=[TOOLS[1]], tool_choice="required", parallel_tool_calls=False)
    assert choice.message.tool_calls[0].function.name == "now" and choice.finish_reason == "tool_calls"
    assert "Be brief.\n\nYou can call these functions:" in "".join(seen) and TEMPLATE.find("tools") < 0


# ---------------------------------------------------------------- thoughts

THINK_TEMPLATE = TOOL_TEMPLATE.replace(
    "assistant\n{% endif %}", "assistant\n{{ opened or '' }}{% endif %}{# </think> #}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("think"), chat_template=THINK_TEMPLATE, max_model_len=1024) as live:
        yield live


def thought(live: LiveServer, question: str, answer: str, opened: str = "", **fields: Any) -> tuple[Any, Any, Any, str]:
    """(thoughts, content, calls, finish reason), stream and full being equal."""
    messages = [{"role": "user", "content": question}]
    kwargs = {"opened": opened}
    for tools in (None, TOOLS):
        key = tuple(
            render_chat(live.tokenizer, messages, tools=tools, chat_template=THINK_TEMPLATE, template_kwargs=kwargs)
        )
        live.model.table[key] = [[*answer.encode(), live.token_id("<|im_end|>")]]
    fields = {"tools": openai.omit, "extra_body": {"chat_template_kwargs": kwargs}, **fields}
    content, calls, reason = same(live, messages, **fields)
    message = full(live, messages, **fields).message
    return message.reasoning_content, content, calls, reason


def test_thoughts_are_split_off(thinker: LiveServer) -> None:
    assert thought(thinker, "t1", "<think>\na b\n</think>\n\nc") == ("a b", "c", [], "stop")
    assert thought(thinker, "t2", "a b</think>c", opened="<think>\n") == ("a b", "c", [], "stop")
    assert thought(thinker, "t3", "c d", opened="<think>\n\n</think>\n\n") == (None, "c d", [], "stop")
    assert thought(thinker, "t4", "c d") == (None, "c d", [], "stop")
    assert thought(thinker, "t5", "a b", opened="<think>", max_tokens=2) == ("a", "", [], "length")


def test_stops_and_thoughts(thinker: LiveServer) -> None:
    """C025: the search for stops cuts no mark; a stop inside a thought ends the answer."""
    assert thought(thinker, "t6", "a</think>b", opened="<think>", stop=["zzzzzz"]) == ("a", "b", [], "stop")
    assert thought(thinker, "t7", "a</think>b", opened="<think>", stop=["</thinly"]) == ("a", "b", [], "stop")
    assert thought(thinker, "t8", "axb</think>c", opened="<think>", stop="x") == ("a", "", [], "stop")


def test_forms_and_tools_after_thoughts(thinker: LiveServer) -> None:
    """The grammar begins where the thought ends."""
    fmt = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    for opened in ("", "<think>\n"):
        begin = "" if opened else "<think>"
        answer = f'{begin}I say "no"!</think>\n\n"yes"'
        assert thought(thinker, "t9" + begin, answer, opened, response_format=fmt) == (
            'I say "no"!',
            '"yes"',
            [],
            "stop",
        )
        answer = f"{begin}hm</think>{CALL}"
        for choice in ("auto", "required"):
            told = thought(
                thinker, "t10" + begin, answer, opened, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
            )
            assert told == ("hm", None, [WEATHER], "tool_calls")
    assert thought(thinker, "t11", '"yes"', response_format=fmt) == (None, '"yes"', [], "stop")
    assert thought(thinker, "t12", '"yes"', "<think></think>", response_format=fmt) == (None, '"yes"', [], "stop")


def test_switched_off(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {"reasoning_parser": "none"}
    with live_server(tmp_path_factory.mktemp("off"), chat_template=THINK_TEMPLATE, settings=settings) as live:
        messages = live.chat_script("t", [*b"<think>a</think>b", "<|im_end|>"])
        key = tuple(render_chat(live.tokenizer, messages, chat_template=THINK_TEMPLATE))
        live.model.table[key] = next(iter(live.model.table.values()))
        body = live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 30}).json()
        assert body["choices"][0]["message"]["content"] == "<think>a</think>b"
        assert "reasoning_content" not in body["choices"][0]["message"]
