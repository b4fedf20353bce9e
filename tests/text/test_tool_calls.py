"""Tool calls in what models write: every format, every way to be wrong, cut into pieces at any place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.reasoning import ReasoningSplitter
from octavo.text.tool_calls import PARSERS, format_of

NAMES = frozenset({"f", "get_weather"})
Call = tuple[str, str]


def read(fmt: str, pieces: list[str]) -> tuple[str, list[Call], bool]:
    """(content, calls, complete), put together from the deltas."""
    parser = PARSERS[fmt](NAMES)
    content, calls = "", list[list[str]]()
    for parsed in [*map(parser.push, pieces), parser.flush()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.index == len(calls), "the name comes first, in order"
                calls.append([delta.name, delta.arguments])
            else:
                calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls], parser.complete


TWO: list[Call] = [("f", '{"a": 1}'), ("get_weather", '{"city": "Zürich }]"}')]
F: list[Call] = [("f", '{"a": 1}')]
CASES: list[tuple[str, str, str, list[Call], bool]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", F, True),
    (
        "hermes",
        'Two of them.\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"city": "Zürich }]"}, "name": "get_weather"}\n</tool_call>\n',
        "Two of them.",
        TWO,
        True,
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", F, True),  # the closing mark is missing
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "", F, True),
    ("hermes", '<tool_call>{"name":"f"}</tool_call> bye', " bye", [("f", "{}")], True),
    ("hermes", '<tool_call>{"name":"f","arguments":null,"id":3}</tool_call>', "", [("f", "{}")], True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')], False),
    ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', [], True),
    ("hermes", '<tool_call>{"name": "nope", "arguments": {}}</tool_call>', "<same>", [], True),
    ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>', "<same>", [], True),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "<same>", [], True),
    ("hermes", "<tool_call>hello", "<same>", [], True),
    ("hermes", "if a <tool_cal then <<tool_call> x  \n", "<same>", [], True),
    ("hermes", "plain text  \n", "<same>", [], True),
    ("hermes", "", "", [], True),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", F, True),
    (
        "mistral",
        'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, '
        '{"name": "get_weather", "arguments": {"city": "Zürich }]"}}]',
        "Hm.",
        TWO,
        True,
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich }]"}', "", TWO, True),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{"a": 1}', "", F, True),
    ("mistral", '[TOOL_CALLS]f{"a": 1', "", [("f", '{"a": 1')], False),
    ("mistral", "[TOOL_CALLS]nope{}", "<same>", [], True),
    ("mistral", "[TOOL_CALLS]", "<same>", [], True),
    ("mistral", "[1, 2] is a [TOOL", "<same>", [], True),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", F, True),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; '
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Zürich }]"}}',
        "",
        TWO,
        True,
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', "<same>", [], True),
    ("llama3_json", "<|python_tag|>print(1)", "<same>", [], True),
    ("json", '\n[{"name": "f", "arguments": {"a": 1}}]\n', "", F, True),
    ("json", '{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1', "",
     [*F, ("f", '{"a": 1')], False),
    ("json", '{"name": "f", "arguments": {"a": 1}} and more', "and more", F, True),
    ("json", '{"name": "f", "arguments": {"a": 1,}} {"name": "f", "arguments": {}}', "<any>",
     [("f", '{"a": 1,')], False),
    ("json", '[{"a": 1}, 2]', "<same>", [], True),
    ("json", 'The answer is {"name": "f", "arguments": {}}', "<same>", [], True),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "text", "content", "calls", "complete"), CASES)
def test_formats(fmt: str, text: str, content: str, calls: list[Call], complete: bool) -> None:
    whole = read(fmt, [text])
    assert whole[1:] == (calls, complete)
    if content != "<any>":
        assert whole[0] == (text if content == "<same>" else content)
    for _, arguments in calls:
        assert not complete or isinstance(json.loads(arguments), dict)
    for size in (1, 2, 3, 7):
        assert read(fmt, [text[i : i + size] for i in range(0, len(text), size)]) == whole


PARTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f", ', '"arguments": {', "}",
    '{"a": "x\\"}"}', '"parameters": ', "f", " ", "\n", "[", "]", ",", ";", "nope", '"', "<", '{"name": "f"}',
]  # fmt: skip


@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(PARTS), max_size=12), st.data())
def test_pieces_make_no_difference(fmt: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(fmt, [text])
    assert read(fmt, pieces) == whole
    if not whole[1]:
        assert whole[0] == text, "what is no call stays as it is"


SHORT = st.text(max_size=8)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(SHORT, st.recursive(
        st.none() | st.integers() | SHORT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
        max_leaves=6,
    ), max_size=3)), min_size=1, max_size=4),
    st.sampled_from(sorted(PARSERS)),
)  # fmt: skip
def test_what_is_written_is_read(calls: list[tuple[str, dict[str, object]]], fmt: str) -> None:
    key = "parameters" if fmt == "llama3_json" else "arguments"
    objects = [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        "llama3_json": "; ".join(objects),
        "json": f"[{', '.join(objects)}]",
    }[fmt]
    content, found, complete = read(fmt, list(text))
    assert content == "" and complete
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_format_of_templates() -> None:
    assert format_of("{{ '<tool_call>' }}") == "hermes"
    assert format_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert format_of("{{ '<|python_tag|>' }}") == "llama3_json"
    assert format_of("{{ messages }}") == format_of(None) == "json"


# ---------------------------------------------------------------- reasoning


def split(pieces: list[str], *, thinking: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(thinking=thinking)
    parts = [*map(splitter.push, pieces), splitter.flush()]
    return "".join(p[0] for p in parts), "".join(p[1] for p in parts)


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\na b\n</think>\n\nc d\n", False, "a b", "c d\n"),
        ("\na b\n</think>\n\nc d", True, "a b", "c d"),
        ("a</think>b", True, "a", "b"),
        ("a </thin b", True, "a </thin b", ""),
        ("a b ", True, "a b", ""),
        ("<think>a", False, "a", ""),
        ("<think></think>b", False, "", "b"),
        ("</think>b", True, "", "b"),
        (" hello <think>a</think>", False, "", " hello <think>a</think>"),
        ("<thin", False, "", "<thin"),
        ("  ", False, "", "  "),
        ("a</think>b</think>c", True, "a", "b</think>c"),
    ],
)
def test_thoughts(text: str, thinking: bool, reasoning: str, content: str) -> None:
    """C025: the mark is found wherever it is cut."""
    assert split([text], thinking=thinking) == (reasoning, content)
    assert split(list(text), thinking=thinking) == (reasoning, content)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "</thi", "nk>", "<"]), max_size=10),
    st.booleans(),
    st.data(),
)
def test_thoughts_in_pieces(parts: list[str], thinking: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, thinking=thinking) == split([text], thinking=thinking)
