"""Tools with `strict: true` where the model decides: its text is free, its calls are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.answers import TOOL_TEMPLATE
from support.fake_assembly import VOCAB_SIZE, byte_tokenizer
from support.live_server import MODEL, LiveServer, live_server

from octavo.constraint import StructuredOutputsParams
from octavo.server.schema import ChatBody
from octavo.server.tool_grammars import answer_grammar
from octavo.server.tools import tool_plan
from octavo.text.chat import render_chat
from octavo.text.constraints import ConstraintCompiler

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zug"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "weathers", "parameters": SCHEMA}},
]
# The lowest bytes that the schema allows instead of "Rome" make "Bern", so that a script goes on in its place.
GOOD, BAD = {"city": "Bern"}, {"city": "Rome"}
TEMPLATES = {
    "hermes": TOOL_TEMPLATE,
    "mistral": TOOL_TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"),
    "mistral_args": TOOL_TEMPLATE.replace("<tool_call>", "[TOOL_CALLS][ARGS]"),
    "llama3_json": TOOL_TEMPLATE.replace("<tool_call>", "python_tag"),
    "json": TOOL_TEMPLATE.replace("<tool_call>", ""),
}


def call(fmt: str, name: str, arguments: Any) -> str:
    """As a model writes it, whatever its arguments are."""
    text = json.dumps(arguments)
    if fmt == "mistral_args":
        return f"[TOOL_CALLS]{name}[ARGS]{text}"
    key = "parameters" if fmt == "llama3_json" else "arguments"
    whole = f'{{"name": "{name}", "{key}": {text}}}'
    return {"hermes": f"<tool_call>\n{whole}\n</tool_call>", "mistral": f"[TOOL_CALLS][{whole}]"}.get(fmt, whole)


@pytest.fixture(scope="module", params=TEMPLATES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    fmt = request.param
    with live_server(tmp_path_factory.mktemp(fmt), chat_template=TEMPLATES[fmt], max_model_len=2048) as live:
        yield fmt, Asker(live, TEMPLATES[fmt])


class Asker:
    """Scripts an answer, asks for it whole and streamed, and tells what came."""

    def __init__(self, live: LiveServer, template: str) -> None:
        self.live = live
        self.template = template
        self.num = 0

    def script(self, text: str, tools: Any) -> list[dict[str, Any]]:
        self.num += 1
        question = [{"role": "user", "content": f"question {self.num}"}]
        key = render_chat(self.live.tokenizer, question, tools=tools, chat_template=self.template)
        end = self.live.token_id("<|im_end|>")
        self.live.model.table[tuple(key)] = [
            [*self.live.tokenizer.encode(text, add_special_tokens=False, parse_special=True), end]
        ]
        return question

    def __call__(self, text: str, tools: Any = TOOLS, **fields: Any) -> tuple[str | None, list[tuple[str, Any]], str]:
        """(content, calls, finish reason)"""
        messages = self.script(text, tools)
        asked = {"messages": messages, "tools": tools, "max_tokens": 400, **fields}
        body: Any = {"model": MODEL, "temperature": 0, **asked}
        create = self.live.openai.chat.completions.create
        choice = create(**body).choices[0]
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        streamed, content = [["", ""] for _ in calls], ""
        for chunk in create(**body, stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for one in delta.tool_calls or []:
                streamed[one.index][0] += one.function.name or ""
                streamed[one.index][1] += one.function.arguments or ""
        assert [tuple(one) for one in streamed] == calls and content == (choice.message.content or "")
        return choice.message.content, [(n, json.loads(a)) for n, a in calls], choice.finish_reason


def test_a_good_call_is_as_it_was_written(served: tuple[str, Asker]) -> None:
    fmt, ask = served
    assert ask(call(fmt, "weather", GOOD)) == (None, [("weather", GOOD)], "tool_calls")


def test_arguments_follow_the_schema(served: tuple[str, Asker]) -> None:
    """Of the strict one; the other's are whatever object the model writes."""
    fmt, ask = served
    assert ask(call(fmt, "weather", BAD)) == (None, [("weather", GOOD)], "tool_calls")
    assert ask(call(fmt, "weathers", BAD)) == (None, [("weathers", BAD)], "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        "Just text.",
        "",
        "é\n\n  ü {}[] <tool",
        '{"city": "Rome"}',
        '{"name": "climate", "arguments": {"city": 1}}',
        '[1, {"name": "weather"}]',
        "It is not [TOOL_CALL] nor <tool_calls>: 1 < 2.",
    ],
)
def test_text_is_free(served: tuple[str, Asker], text: str) -> None:
    _, ask = served
    content, calls, reason = ask(text)
    assert ((content or "").strip(), calls, reason) == (text.strip(), [], "stop")


def test_several_calls(served: tuple[str, Asker]) -> None:
    fmt, ask = served
    one, two = call(fmt, "weather", GOOD), call(fmt, "weather", BAD)
    text = {
        "hermes": f"First.\n{one}\nThen.\n{two}",
        "mistral": one.removesuffix("]") + ", " + two.removeprefix("[TOOL_CALLS]["),
        "mistral_args": one + two,
        "llama3_json": f"{one}; {two}",
        "json": f"[{one}, {two}]",
    }[fmt]
    assert ask(text)[1:] == ([("weather", GOOD), ("weather", GOOD)], "tool_calls")
    _, calls, reason = ask(text, parallel_tool_calls=False)
    assert reason == "tool_calls" and calls == [("weather", GOOD)]


def test_blanks_and_other_ways_to_begin(served: tuple[str, Asker]) -> None:
    """No way around the schema: what would be a call otherwise is one, or text."""
    fmt, ask = served
    if fmt not in ("llama3_json", "json"):
        return
    key = "parameters" if fmt == "llama3_json" else "arguments"
    for begin in ("\n{ ", " [\n{", "<|python_tag|>{", "{"):
        end = "]" if "[" in begin else ""
        _, calls, _ = ask(f'{begin}"name" :\t"weather", "{key}": {{"city": "Rome"}}}}{end}')
        assert calls[0] == ("weather", GOOD)
    for text in (
        f'{{"{key}": {{"city": "Rome"}}, "name": "weather"}}',
        f'{{"id": 1, "name": "weather", "{key}": {{"city": "Rome"}}}}',
        f'{{"name": "w\\u0065ather", "{key}": {{"city": "Rome"}}}}',
        f'{{"n\\u0061me": "weather", "{key}": {{"city": "Rome"}}}}',
    ):
        assert ask(text) == (text, [], "stop")


@pytest.mark.parametrize("fmt", ["hermes", "mistral", "mistral_args"])
@pytest.mark.parametrize("prompted", [False, True])
def test_special_tokens_and_thoughts(tmp_path_factory: pytest.TempPathFactory, fmt: str, prompted: bool) -> None:
    """A thought may speak of calls; the marks may be tokens of their own or letters."""
    template = TEMPLATES[fmt] + ("<think>\n" if prompted else "{# <think> #}")
    marks = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
    for specials in ((), marks, marks[:4], marks[4:]):
        with live_server(
            tmp_path_factory.mktemp("marks"), chat_template=template, specials=specials, max_model_len=2048
        ) as live:
            ask = Asker(live, template)
            thought = "" if prompted else "<think>"
            thought += "I could <tool or [TOOL_ it.\n</think>\n\n"
            _, calls, reason = ask(thought + call(fmt, "weather", BAD))
            assert reason == "tool_calls" and calls == [("weather", GOOD)], specials
            assert ask(thought + "No.") == ("No.", [], "stop")
            spelled = [*(thought + call(fmt, "weather", BAD)).encode()]
            key = next(reversed(live.model.table))
            live.model.table[key] = [[*spelled, live.token_id("<|im_end|>")]]
            body: Any = {"model": MODEL, "temperature": 0, "max_tokens": 400, "tools": TOOLS}
            question: Any = [{"role": "user", "content": f"question {ask.num}"}]
            choice = live.openai.chat.completions.create(messages=question, **body).choices[0]
            for made in choice.message.tool_calls or []:
                assert json.loads(made.function.arguments)["city"] in ("Bern", "Zug")


def test_the_limit_may_cut_a_call(served: tuple[str, Asker]) -> None:
    fmt, ask = served
    messages = ask.script(call(fmt, "weather", GOOD), TOOLS)
    for limit in (5, 20, len(call(fmt, "weather", GOOD)) - 3):
        body = {"messages": messages, "tools": TOOLS, "max_tokens": limit}
        assert ask.live.post("/v1/chat/completions", body).json()["choices"][0]["finish_reason"] == "length"


def test_what_cannot_be_enforced_is_refused(served: tuple[str, Asker]) -> None:
    _, ask = served
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    for strict, code in ((True, 400), (False, 200), (None, 200), ("yes", 400), (1, 400)):
        tools = [{"type": "function", "function": {**function, "strict": strict}}]
        response = ask.live.post("/v1/chat/completions", {**body, "tools": tools})
        assert response.status_code == code, (strict, response.text)
        if code == 400:
            assert response.json()["error"]["param"] == "tools"


def test_other_routes(served: tuple[str, Asker]) -> None:
    fmt, ask = served
    question = ask.script(call(fmt, "weather", BAD), TOOLS)[0]["content"]
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = ask.live.openai.responses.create(model=MODEL, input=question, tools=flat, temperature=0)  # type: ignore
    (item,) = answer.output
    assert item.type == "function_call" and json.loads(item.arguments) == GOOD
    named = [{"name": f["name"], "input_schema": SCHEMA, "strict": f.get("strict")} for f in flat]
    body = {"messages": [{"role": "user", "content": question}], "tools": named, "max_tokens": 400}
    (block,) = ask.live.post("/v1/messages", body).json()["content"]
    assert (block["type"], block["input"]) == ("tool_use", GOOD)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_many_tools_compile(template: str) -> None:
    """As many as are allowed, half of them strict, within the limits of the compiler."""
    functions = [{"name": f"tool-{i}", "parameters": SCHEMA, "strict": i % 2 == 1} for i in range(256)]
    body = ChatBody(tools=[{"type": "function", "function": function} for function in functions])
    plan = tool_plan(body, parser="auto", template=template)
    assert plan is not None and len(plan.strict) == 128
    rules = answer_grammar(byte_tokenizer(), plan, template, not_at_start="<think>")
    wish = StructuredOutputsParams(grammar="\n".join(["start: answer", *rules]))
    assert any(ConstraintCompiler(byte_tokenizer, VOCAB_SIZE).compile(wish).start().mask())
