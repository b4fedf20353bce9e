"""Structured output with the real model: whatever it would like to say, it says JSON of the form asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.constraint import StructuredOutputsParams
from octavo.llm import LLM
from octavo.request import SamplingParams
from octavo.server.answer import AnswerPlan, whole_calls
from octavo.server.tool_grammars import calls_grammar
from octavo.server.tools import ToolPlan

SEEDS = range(8)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"$ref": "#/$defs/kind"},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["cat", "Dog", "猫", "ñandú"]}},
}


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), max_model_len=1024, use_tqdm_on_load=False) as llm:
        yield llm


def many(
    llm: LLM, prompt: str, wish: StructuredOutputsParams, seeds: Sequence[int] = SEEDS, *, together: bool = True
) -> list[tuple[str, str | None]]:
    params = [SamplingParams(temperature=2.0, seed=s, max_tokens=300, structured_outputs=wish) for s in seeds]
    groups = [params] if together else [[p] for p in params]
    results = [r for group in groups for r in llm.generate([prompt] * len(group), group, use_tqdm=False)]
    return [(r.outputs[0].text, r.outputs[0].finish_reason) for r in results]


def test_schema_at_temperature_2(llm: LLM) -> None:
    """C125, C133: every seed gives a valid object; alone or together it is the same one."""
    jsonschema = pytest.importorskip("jsonschema")
    wish = StructuredOutputsParams(json=SCHEMA)
    together = many(llm, "A pet as JSON:\n", wish)
    for text, reason in together:
        assert reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
    assert together[:2] == many(llm, "A pet as JSON:\n", wish, SEEDS[:2], together=False)
    assert len(set(together)) > 3


def test_other_kinds_at_temperature_2(llm: LLM) -> None:
    for wish, matches in (
        (StructuredOutputsParams(choice=("positive", "negative", "neutral")), r"positive|negative|neutral"),
        (StructuredOutputsParams(regex=r"\d{3}-[a-z]{2,4}"), r"\d{3}-[a-z]{2,4}"),
        (StructuredOutputsParams(grammar='start: sum\nsum: NUM ("+" NUM){1,3}\nNUM: /[0-9]{1,3}/'), r"\d+(\+\d+){1,3}"),
    ):
        for text, reason in many(llm, "Answer: ", wish):
            assert reason == "stop" and re.fullmatch(matches, text), text


@pytest.mark.parametrize("fmt", ["hermes", "llama3_json", "mistral", "json"])
def test_forced_calls_at_temperature_2(llm: LLM, fmt: str) -> None:
    """Whatever the format, a call that must be made is made, and read back."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    }
    tools = ToolPlan(tools=[], schemas={"get_weather": parameters}, format=fmt, forced=("get_weather",), named=True)
    grammar = "\n".join(["start: calls", *calls_grammar(llm.get_tokenizer(), tools, None)])
    for text, reason in many(llm, "Weather for 3 days: ", StructuredOutputsParams(grammar=grammar), SEEDS[:4]):
        reader = AnswerPlan(tools=tools).reader()
        parts = reader.push(text, last=True)
        (call,) = whole_calls(reader, parts.calls)
        arguments = json.loads(call["function"]["arguments"])
        assert reason == "stop" and not parts.content and 1 <= arguments["days"] <= 9
