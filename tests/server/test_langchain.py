"""LangChain's client for OpenAI, unchanged but for the URL: chat, tools, structured output, completions, embeddings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field
from support.answers import CITY, TOOL_TEMPLATE, answer_questions
from support.live_server import MODEL, LiveServer, live_server

# The openai client puts the parsed object into a field that its own type does not know.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")


class City(BaseModel):
    """A city."""

    name: str
    population: int = Field(description="How many live there")


@tool
def get_weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"{days} day of rain in {city}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("langchain")
    with live_server(directory, chat_template=TOOL_TEMPLATE, max_model_len=2048, num_blocks=1024) as live:
        answer_questions(live)
        yield live
        live.wait_until(lambda: live.idle)


def settings(live: LiveServer) -> dict[str, Any]:
    return {"model": MODEL, "base_url": f"{live.url}/v1", "api_key": "none", "max_retries": 0}


@pytest.fixture
def chat(server: LiveServer) -> ChatOpenAI:
    return ChatOpenAI(**settings(server))


def test_chat_and_usage(chat: ChatOpenAI) -> None:
    answer = chat.invoke([("system", "Be brief."), ("user", "Who?")])
    assert answer.content == "I am Octavo."
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    usage = answer.usage_metadata
    assert usage is not None and usage["output_tokens"] == len("I am Octavo.") + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    again = chat.invoke([("system", "Be brief."), ("user", "Who?")]).usage_metadata
    assert again is not None and again["input_token_details"]["cache_read"] == usage["input_tokens"] - 1


def test_stream(server: LiveServer) -> None:
    chunks = list(ChatOpenAI(**settings(server), stream_usage=True).stream("Count!"))
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
    whole = sum(chunks[1:], start=chunks[0])
    assert whole.content == "one two three" and whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == 14


def test_many_at_once(chat: ChatOpenAI) -> None:
    answers = asyncio.run(chat.abatch(["Who?", "Count!"] * 4))
    assert [a.content for a in answers] == ["I am Octavo.", "one two three"] * 4


def test_samples_and_logprobs(server: LiveServer) -> None:
    chat = ChatOpenAI(**settings(server), n=2, seed=1, logprobs=True, top_logprobs=2)
    result = chat.generate([[HumanMessage("Who?")]])
    assert [g.text for g in result.generations[0]] == ["I am Octavo."] * 2
    tokens = result.generations[0][1].generation_info["logprobs"]["content"]
    assert b"".join(bytes(t["bytes"]) for t in tokens).startswith(b"I am Octavo.")
    assert all(len(t["top_logprobs"]) == 2 for t in tokens)


@pytest.mark.parametrize("strict", [None, True])
def test_a_tool_is_bound_called_and_answered(chat: ChatOpenAI, strict: bool | None) -> None:
    bound = chat.bind_tools([get_weather], strict=strict)
    history: list[Any] = [HumanMessage("Weather?")]
    call = bound.invoke(history)
    assert call.content == "" and call.response_metadata["finish_reason"] == "tool_calls"
    assert [(c["name"], c["args"]) for c in call.tool_calls] == [("get_weather", {"city": "Bern", "days": 2})]
    result = get_weather.invoke(call.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert bound.invoke([*history, call, result]).content == "Take an umbrella."


def test_a_call_in_pieces(chat: ChatOpenAI) -> None:
    chunks = list(chat.bind_tools([get_weather]).stream("Weather?"))
    whole = sum(chunks[1:], start=chunks[0])
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [("get_weather", {"city": "Bern", "days": 2})]
    assert not whole.invalid_tool_calls


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_a_call_that_is_asked_for_is_made(chat: ChatOpenAI, choice: str) -> None:
    """The model would rather talk; the arguments end where the limit cuts, so the name is what counts."""
    answer = chat.bind_tools([get_weather], tool_choice=choice).invoke("Chat!", max_tokens=200)
    assert answer.content == ""
    assert [c["name"] for c in (*answer.tool_calls, *answer.invalid_tool_calls)] == ["get_weather"]


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("City!", {}),
        ("City!", {"method": "json_schema", "strict": True}),
        ("City!", {"method": "json_mode"}),
        ("City by a call!", {"method": "function_calling"}),
        ("City by a call!", {"method": "function_calling", "strict": True}),
    ],
)
@pytest.mark.parametrize("responses", [False, True])
def test_structured_output(server: LiveServer, question: str, options: dict[str, Any], responses: bool) -> None:
    """On chat completions and on the Responses API, whole and as a stream."""
    chat = ChatOpenAI(**settings(server), use_responses_api=responses).with_structured_output(City, **options)
    wanted = City(**json.loads(CITY))
    assert chat.invoke(question) == wanted
    assert list(chat.stream(question))[-1] == wanted


def test_responses_api(server: LiveServer) -> None:
    chat = ChatOpenAI(**settings(server), use_responses_api=True)
    assert chat.invoke("Who?").text == "I am Octavo."
    chunks = list(chat.stream("Count!"))
    assert sum(chunks[1:], start=chunks[0]).text == "one two three"
    call = chat.bind_tools([get_weather]).invoke("Weather?")
    assert [c["args"] for c in call.tool_calls] == [{"city": "Bern", "days": 2}]
    result = get_weather.invoke(call.tool_calls[0])
    assert chat.invoke([HumanMessage("Weather?"), call, result]).text == "Take an umbrella."


def test_completions(server: LiveServer) -> None:
    llm = OpenAI(**settings(server), max_tokens=20)
    result = llm.generate(["Who?", "Count!"])
    assert [g[0].text for g in result.generations] == ["I am Octavo.", "one two three"]
    assert result.llm_output is not None and result.llm_output["token_usage"]["completion_tokens"] == 13 + 14
    assert "".join(llm.stream("Count!")) == "one two three"


def test_embeddings(server: LiveServer) -> None:
    """Without `check_embedding_ctx_length` LangChain sends texts, not the token ids of OpenAI's models."""
    embeddings = OpenAIEmbeddings(**settings(server), check_embedding_ctx_length=False)
    vectors = embeddings.embed_documents(["red", "green"])
    plain = server.openai.embeddings.create(model=MODEL, input=["red", "green"])
    assert vectors == [entry.embedding for entry in plain.data]
    assert embeddings.embed_query("green") == vectors[1]


def test_errors(server: LiveServer, chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        chat.invoke("Who?", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        chat.invoke("x" * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(**{**settings(server), "model": "nope"}).invoke("Who?")
