"""Tool calls and thoughts on /v1/responses and /v1/messages, with the openai and anthropic clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from support.live_server import MODEL, LiveServer, live_server

from octavo.text.chat import render_chat

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t['function'] | tojson }}{% endfor %}<tool_call><|im_end|>"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['id'] }}:{{ c['function'] | tojson }}{% endfor %}"
    "{% if m['tool_call_id'] %}({{ m['tool_call_id'] }}){% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}<think></think>"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zug"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather", "parameters": SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
OPENAI_TOOLS: Any = [{"type": "function", **FUNCTION}]
ANTHROPIC_TOOLS: Any = [{"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}]
ARGUMENTS = '{"city": "Bern"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    template = TEMPLATE.replace("<think></think>", "{# <think></think> #}")
    with live_server(tmp_path_factory.mktemp("tools"), chat_template=template, max_model_len=1024) as live:
        yield live


@pytest.fixture(scope="module")
def thoughtless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    template = TEMPLATE.replace("<think></think>", "")
    with live_server(tmp_path_factory.mktemp("tools"), chat_template=template, max_model_len=1024) as live:
        yield live


def script(live: LiveServer, messages: Any, answer: str, tools: Any = CHAT_TOOLS) -> Any:
    """From now on these messages, asked with the tool, are answered so."""
    key = tuple(render_chat(live.tokenizer, messages, tools=tools))
    live.model.table[key] = [[*answer.encode(), live.token_id("<|im_end|>")]]
    return messages


def client_of(live: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def shapes(response: Any) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            made.append((item.type, item.name, item.arguments, item.status))
        else:
            made.append((item.type, item.content[0].text, item.status))
    return made


def test_responses(server: LiveServer) -> None:
    script(server, user("q1"), f"<think>Hm.</think>Let me see.\n{CALL}")
    create = server.openai.responses.create
    whole = create(model=MODEL, input="q1", tools=OPENAI_TOOLS, temperature=0)
    assert shapes(whole) == [
        ("reasoning", "Hm.", "completed"),
        ("message", "Let me see.", "completed"),
        ("function_call", "get_weather", ARGUMENTS, "completed"),
    ]
    assert whole.status == "completed" and whole.output_text == "Let me see." and len(whole.tools) == 1
    events = list(create(model=MODEL, input="q1", tools=OPENAI_TOOLS, temperature=0, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(e.type for e in events))
    assert kinds.index("response.reasoning_text.delta") < kinds.index("response.output_text.delta")
    assert kinds.index("response.output_text.done") < kinds.index("response.function_call_arguments.delta")
    deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert deltas == done.arguments == ARGUMENTS
    added = [e.output_index for e in events if e.type == "response.output_item.added"]
    ended = [e.output_index for e in events if e.type == "response.output_item.done"]
    assert added == ended == [0, 1, 2]
    assert events[-1].type == "response.completed" and shapes(events[-1].response) == shapes(whole)
    with server.openai.responses.stream(model=MODEL, input="q1", tools=OPENAI_TOOLS, temperature=0) as stream:
        assert shapes(stream.get_final_response()) == shapes(whole)


def test_responses_go_on_after_the_result(server: LiveServer) -> None:
    """What came out goes back in, with the result: the template sees one turn of the assistant and its call."""
    script(server, user("q2"), CALL)
    first = server.openai.responses.create(model=MODEL, input="q2", tools=OPENAI_TOOLS, temperature=0)
    (call,) = first.output
    history: Any = [*user("q2"), call.to_dict(), {
        "type": "function_call_output", "call_id": call.call_id, "output": "sunny"  # type: ignore[union-attr]
    }]  # fmt: skip
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    made = {"id": call.call_id, "type": "function", "function": function}  # type: ignore[union-attr]
    chat = [
        *user("q2"),
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": "sunny"},
    ]
    script(server, chat, "It is sunny.")
    second = server.openai.responses.create(model=MODEL, input=history, tools=OPENAI_TOOLS, temperature=0)
    assert second.output_text == "It is sunny."


def test_responses_enforce_the_choice(thoughtless: LiveServer) -> None:
    script(thoughtless, user("q3"), "No, I will not.")
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        ask: Any = {"model": MODEL, "input": "q3", "tools": OPENAI_TOOLS, "tool_choice": choice, "temperature": 0}
        forced = thoughtless.openai.responses.create(**ask, parallel_tool_calls=False)
        (item,) = forced.output
        assert item.type == "function_call" and json.loads(item.arguments)["city"] in ("Bern", "Zug")
    cut = thoughtless.openai.responses.create(
        model=MODEL, input="q3", tools=OPENAI_TOOLS, tool_choice="required", temperature=0, max_output_tokens=50
    )
    assert cut.status == "incomplete" and all(i.status == "incomplete" for i in cut.output)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "no blanks"}]}, "tools"),
        ({"tools": [*OPENAI_TOOLS, *OPENAI_TOOLS]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": OPENAI_TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ],
)
def test_responses_refuse(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.responses.create(model=MODEL, input="a", **fields)
    assert caught.value.param == param


def test_messages(server: LiveServer) -> None:
    script(server, user("q4"), f"<think>Hm.</think>Let me see.\n{CALL}")
    ask: Any = {"model": MODEL, "max_tokens": 300, "messages": user("q4"), "tools": ANTHROPIC_TOOLS}
    whole = client_of(server).messages.create(**ask)
    blocks = [block.to_dict() for block in whole.content]
    call_id = blocks[2].pop("id")
    assert isinstance(call_id, str) and call_id
    assert blocks == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Bern"}},
    ]
    assert whole.stop_reason == "tool_use"
    with client_of(server).messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert [b.type for b in final.content] == ["thinking", "text", "tool_use"] and final.stop_reason == "tool_use"
    assert final.content[2].to_dict()["input"] == {"city": "Bern"}
    script(server, [
        *user("q4"),
        {"role": "assistant", "content": "Let me see.", "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
        ]},
        {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
    ], "It is sunny.")  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "sunny"}
    history = [
        *user("q4"),
        {"role": "assistant", "content": [block.to_dict() for block in whole.content]},
        {"role": "user", "content": [result]},
    ]
    answer = client_of(server).messages.create(**{**ask, "messages": history})
    assert answer.content[0].to_dict()["text"] == "It is sunny." and answer.stop_reason == "end_turn"
    counted = client_of(server).messages.count_tokens(model=MODEL, messages=user("q4"), tools=ANTHROPIC_TOOLS)
    assert counted.input_tokens == len(render_chat(server.tokenizer, user("q4"), tools=CHAT_TOOLS))


def test_messages_enforce_the_choice(thoughtless: LiveServer) -> None:
    script(thoughtless, user("q5"), "No, I will not.")
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    ):
        ask: Any = {"model": MODEL, "max_tokens": 300, "messages": user("q5"), "tools": ANTHROPIC_TOOLS}
        message = client_of(thoughtless).messages.create(**ask, tool_choice=choice)
        (block,) = message.content
        assert block.type == "tool_use" and block.input["city"] in ("Bern", "Zug")  # type: ignore[index]
        assert message.stop_reason == "tool_use"
    cut = client_of(thoughtless).messages.create(**{**ask, "max_tokens": 50}, tool_choice={"type": "any"})
    assert cut.stop_reason == "max_tokens"
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client_of(thoughtless).messages.create(**{**ask, "tools": []}, tool_choice={"type": "any"})
