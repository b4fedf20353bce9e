"""What a LlamaIndex program does with an OpenAI-compatible server. Arguments: URL and model; prints JSON.

It runs in an environment of its own (see test_llamaindex.py), so it imports nothing of Octavo.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str
    population: int = Field(description="How many live there")


def get_weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"{days} day of rain in {city}"


def chat(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    llm = OpenAILike(**settings, is_chat_model=True)
    history = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Who?")]
    whole = llm.chat(history)
    yield "chat", [whole.message.role.value, whole.message.content, whole.raw.usage.completion_tokens]
    yield "complete", llm.complete("Who?").text
    yield "async", asyncio.run(llm.achat(history)).message.content
    deltas = list(llm.stream_chat([ChatMessage(role="user", content="Count!")]))
    yield "stream", ["".join(d.delta or "" for d in deltas), deltas[-1].message.content]


def completion(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    llm = OpenAILike(**settings, is_chat_model=False)
    yield "completion", llm.complete("Who?").text
    yield "completion stream", "".join(d.delta or "" for d in llm.stream_complete("Count!"))


def tools(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    llm = OpenAILike(**settings, is_chat_model=True, is_function_calling_model=True)
    weather = FunctionTool.from_defaults(get_weather)
    calls = llm.get_tool_calls_from_response(llm.chat_with_tools([weather], "Weather?"))
    yield "tools", [[c.tool_name, c.tool_kwargs] for c in calls]
    last = list(llm.stream_chat_with_tools([weather], "Weather?", tool_required=True))[-1]
    yield "tools stream", [[c.tool_name, c.tool_kwargs] for c in llm.get_tool_calls_from_response(last)]
    yield "called", str(llm.predict_and_call([weather], "Weather?"))
    yield "structured by a call", llm.structured_predict(City, PromptTemplate("City by a call!")).model_dump()


def structured(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    llm = OpenAILike(**settings, is_chat_model=True, should_use_structured_outputs=True)
    yield "structured", llm.structured_predict(City, PromptTemplate("City!")).model_dump()
    yield "structured stream", list(llm.stream_structured_predict(City, PromptTemplate("City!")))[-1].model_dump()
    yield "structured llm", json.loads(llm.as_structured_llm(City).complete("City!").text)


def main(url: str, model: str) -> None:
    settings = {"model": model, "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "context_window": 2048}
    seen = dict(pair for part in (chat, completion, tools, structured) for pair in part(settings))
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
