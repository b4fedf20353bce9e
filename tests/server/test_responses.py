"""POST /v1/responses with the real openai client, and what it refuses."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseOutputMessage, ResponseOutputText
from support.live_server import MODEL, LiveServer

END = "<|im_end|>"


def text_of(response: Response) -> ResponseOutputText:
    (item,) = response.output
    assert isinstance(item, ResponseOutputMessage)
    (part,) = item.content
    assert isinstance(part, ResponseOutputText)
    return part


def test_whole(live: LiveServer) -> None:
    live.chat_script("Say hello", ["Hello", " red", END])
    response = live.openai.responses.create(model=MODEL, input="Say hello", temperature=0, metadata={"a": "b"})
    assert response.output_text == "Hello red"
    assert response.status == "completed" and response.incomplete_details is None and response.error is None
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")
    assert response.temperature == 0 and response.top_p == 1 and response.model == MODEL
    assert response.metadata == {"a": "b"} and response.store is False
    usage = response.usage
    prompt = live.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Say hello"}])
    assert usage is not None and prompt.usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (prompt.usage.prompt_tokens, 3)
    assert usage.total_tokens == usage.input_tokens + 3


def test_cut_by_the_limit(live: LiveServer) -> None:
    live.chat_script("Count", [" one", " red", " blue", END])
    response = live.openai.responses.create(model=MODEL, input="Count", temperature=0, max_output_tokens=2)
    assert (response.output_text, response.status) == (" one red", "incomplete")
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


def test_stream(live: LiveServer) -> None:
    live.chat_script("Say hello", ["Hello", " red", END])
    events = list(live.openai.responses.create(model=MODEL, input="Say hello", temperature=0, stream=True))
    # Tokens that come together are one delta.
    assert list(dict.fromkeys(e.type for e in events)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello red"
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == "Hello red"
    whole = live.openai.responses.create(model=MODEL, input="Say hello", temperature=0)
    assert last.response.usage is not None and whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert text_of(last.response) == text_of(whole)


def test_stream_helper_and_names(live: LiveServer) -> None:
    live.chat_script("Say hello", ["Hello", END])
    with live.openai.responses.stream(model=MODEL, input="Say hello", max_output_tokens=9) as stream:
        assert stream.get_final_response().output_text == "Hello"
    body = {"input": "Say hello", "stream": True, "max_output_tokens": 1}
    lines = live.post("/v1/responses", body).text.splitlines()
    assert lines[0] == "event: response.created" and lines[1].startswith('data: {"type":"response.created",')
    assert "event: response.incomplete" in lines and not any("[DONE]" in line for line in lines)


def test_items(live: LiveServer) -> None:
    """A whole conversation, as clients send the output of one response back as input of the next."""
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi\nthere"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Again"},
    ]
    asked = live.post("/tokenize", {"messages": messages, "temperature": None})
    assert asked.status_code == 400  # an unknown field there
    tokens = live.http.post(f"{live.url}/tokenize", json={"messages": messages}).json()["tokens"]
    live.model.table[tuple(tokens)] = [[live.token_id("Paris"), live.token_id(END)]]
    first: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": "there"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": "Again"},
    ]  # fmt: skip
    response = live.openai.responses.create(model=MODEL, input=first, instructions="Be brief", temperature=0)
    assert response.output_text == "Paris" and response.instructions == "Be brief"
    assert response.usage is not None and response.usage.input_tokens == len(tokens)


def test_logprobs(live: LiveServer) -> None:
    live.chat_script("Say hello", ["Hello", " red", END])
    response = live.openai.responses.create(
        model=MODEL, input="Say hello", temperature=0, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    entries = text_of(response).logprobs
    assert entries is not None and [e.token for e in entries] == ["Hello", " red", END]
    assert all(len(e.top_logprobs) == 2 and e.logprob > -1e-6 for e in entries)


class Answer(pydantic.BaseModel):
    a: Literal["aaa"]


def test_structured_output(live: LiveServer) -> None:
    """The script says "aaa": the schema leaves only one way to say it."""
    live.chat_script("Say a", ["a", "a"])
    parsed = live.openai.responses.parse(model=MODEL, input="Say a", temperature=0, text_format=Answer)
    assert parsed.output_parsed == Answer(a="aaa") and parsed.status == "completed"
    text = live.openai.responses.create(
        model=MODEL, input="Say a", temperature=0, text={"format": {"type": "json_object"}}, max_output_tokens=1
    )
    assert (text.output_text, text.status) == ("{", "incomplete")
    with pytest.raises(openai.BadRequestError, match="text"):
        live.openai.responses.create(
            model=MODEL, input="a", text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}
        )


def test_explained(live: LiveServer) -> None:
    body = {"input": "a", "max_output_tokens": 1, "explain": True}
    assert live.post("/v1/responses", body).json()["octavo"]["prompts"]
    lines = live.post("/v1/responses", {**body, "stream": True}).text.splitlines()
    assert '"octavo":{' in lines[-2]
    assert "octavo" not in live.post("/v1/responses", {**body, "explain": False}).json()


def test_failure_in_the_stream(live: LiveServer) -> None:
    live.model.row_error = lambda row: "NaN" if row.start > 40 else None
    with live.openai.responses.create(model=MODEL, input="a", stream=True, max_output_tokens=60) as stream:
        events = list(stream)
    last = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error is not None and last.response.error.code == "server_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"color": "red"}}, "text.color"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "root", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"input": "a" * 300}, "input"),
    ],
)
def test_refusals(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        response = live.post("/v1/responses", {"input": "a", **fields, "stream": stream})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert len(response.content) < 1000


def test_the_client_sees_its_own_errors(live: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError):
        live.openai.responses.create(model="nope", input="a")
    with pytest.raises(openai.BadRequestError, match="not stored"):
        live.openai.responses.create(model=MODEL, input="a", previous_response_id="resp_1")
