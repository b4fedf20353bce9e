"""The real openai client, unchanged: both routes, streamed and not, sync and async."""

from __future__ import annotations

import asyncio

import openai
import pytest
from support.live_server import MODEL, LiveServer


def test_completion(live: LiveServer) -> None:
    prompt = live.script("oa complete", [" red", " green", " blue", "<|im_end|>"])
    answer = live.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=20, temperature=0)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert [c.text for c in answer.choices] == [" red green blue"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 4)
    assert answer.usage.total_tokens == len(prompt) + 4


def test_completion_stream(live: LiveServer) -> None:
    prompt = live.script("oa complete stream", [" red", " green", " blue"])
    chunks = list(
        live.openai.completions.create(
            model=MODEL, prompt=prompt, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
    )
    # Tokens that are ready together may share a chunk.
    assert "".join(c.choices[0].text for c in chunks[:-1]) == " red green blue"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-2])
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
    assert len({c.id for c in chunks}) == 1


def test_chat(live: LiveServer) -> None:
    messages = live.chat_script("oa chat", ["Hello", " red", "<|im_end|>"])
    answer = live.openai.chat.completions.create(model=MODEL, messages=messages, temperature=0)  # type: ignore[arg-type]
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello red"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_chat_stream(live: LiveServer) -> None:
    messages = live.chat_script("oa chat stream", ["Hello", " red", "<|im_end|>"])
    chunks = list(
        live.openai.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    first, *middle, end, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(c.choices[0].delta.content or "" for c in middle) == "Hello red"
    assert end.choices[0].finish_reason == "stop" and end.choices[0].delta.content is None
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 3
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


def test_chat_stream_helper(live: LiveServer) -> None:
    """The client's own accumulator reads our chunks."""
    messages = live.chat_script("oa helper", ["Paris", "<|im_end|>"])
    with live.openai.chat.completions.stream(model=MODEL, messages=messages) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Paris"
    assert final.choices[0].finish_reason == "stop"


def test_async_streams_side_by_side(live: LiveServer) -> None:
    messages = [live.chat_script(f"oa async {i}", ["Hello"] * (i + 1) + ["<|im_end|>"]) for i in range(8)]

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=messages[i], stream=True)  # type: ignore[call-overload]
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def everyone() -> list[str]:
        async with live.async_openai as client:
            return await asyncio.gather(*(one(client, i) for i in range(8)))

    assert asyncio.run(everyone()) == ["Hello" * (i + 1) for i in range(8)]


def test_models(live: LiveServer) -> None:
    models = list(live.openai.models.list())
    assert [m.id for m in models] == [MODEL]
    assert live.openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as info:
        live.openai.models.retrieve("nope")
    assert info.value.code == "model_not_found"


def test_errors_are_the_clients_own(live: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        live.openai.completions.create(model="nope", prompt="x")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        live.openai.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        live.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 300}], stream=True)
    assert long.value.code == "context_length_exceeded" and long.value.param == "messages"
