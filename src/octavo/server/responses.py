"""POST /v1/responses, the stateless part: its body becomes a chat, the answer a `response` object or its events."""

from __future__ import annotations

import itertools
import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request

from octavo.errors import OctavoError
from octavo.request import FinishReason
from octavo.server.answer import AnswerPlan
from octavo.server.chat import chat_generation
from octavo.server.failures import error_object
from octavo.server.generation import Generation, Update
from octavo.server.intake import check_generation, read_json, respond
from octavo.server.logprobs import chat_logprobs
from octavo.server.output_items import OutputItems
from octavo.server.response_items import input_messages
from octavo.server.schema import ChatBody, StreamOptions, refuse
from octavo.server.sse import GenerationResponse, OpenAiErrors, named_frame
from octavo.server.state import ServerState
from octavo.server.translate import renamed
from octavo.text.tokenizer import Tokenizer

WITH_LOGPROBS = "message.output_text.logprobs"
# Asking for these adds nothing to a text answer.
EMPTY_INCLUDES = ("reasoning.encrypted_content",)
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
}


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`None` always means "not given"."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's: as in the other generation routes.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    explain: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused: nothing is stored here, and nothing runs here but the model.
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    background_options: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[Any] | dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    access_programs: dict[str, Any] | None = None
    image: dict[str, Any] | None = None
    truncation: str | None = None
    # Accepted without effect.
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    max_tool_calls: int | None = None


async def create_response(request: Request, state: ServerState) -> GenerationResponse:
    body, size = await read_json(request, state, ResponsesBody)
    with renamed(NAMES):
        parsed = check_generation(chat_body(body), size, state)
        generation, plan = await chat_generation(state, parsed, "input")
    renderer = ResponsesRenderer(state.tokenizer, generation, body, state.settings.model_name, plan)
    return respond(state, generation, renderer, parsed.body)


def chat_body(body: ResponsesBody) -> ChatBody:
    """The chat that asks for the same. Raises RequestError."""
    _check_supported(body)
    shared = (
        "model", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "stream",
        "stream_options", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "ignore_eos", "cache_salt", "priority", "explain",
        "chat_template_kwargs",
    )  # fmt: skip
    text, reasoning = body.text or {}, body.reasoning or {}
    _check_keys("text", text, ("format", "verbosity"))
    _check_keys("reasoning", reasoning, ("effort",))
    with_logprobs = body.top_logprobs is not None or WITH_LOGPROBS in (body.include or ())
    return ChatBody(
        **{name: getattr(body, name) for name in shared},
        messages=input_messages(body.input, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        logprobs=True if with_logprobs else None,
        tools=None if body.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(text.get("format")),
        verbosity=_text_of(text, "text", "verbosity"),
        reasoning_effort=_text_of(reasoning, "reasoning", "effort"),
    )


def _check_supported(body: ResponsesBody) -> None:
    for name, why in (
        ("store", "responses are not stored"),
        ("previous_response_id", "responses are not stored, so send the whole conversation as input"),
        ("conversation", "conversations are not stored, so send the whole conversation as input"),
        ("background", "requests are answered on the connection that brought them"),
        ("background_options", "requests are answered on the connection that brought them"),
        ("prompt", "prompts are not stored"),
        ("context_management", "the context is used as it is sent"),
        ("moderation", "there is no moderation"),
        ("access_programs", "there are no access programs"),
        ("image", "there are no images"),
    ):
        if getattr(body, name):
            raise refuse(f"{name} is not supported: {why}", name, code="unsupported_field")
    if body.truncation not in (None, "disabled"):
        raise refuse("truncation other than 'disabled' is not supported", "truncation", code="unsupported_field")
    for name in body.include or ():
        if name != WITH_LOGPROBS and name not in EMPTY_INCLUDES:
            raise refuse(f"include supports {WITH_LOGPROBS!r} only", "include", code="unsupported_field")


def _check_keys(field: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for key, value in given.items():
        if key not in known and value is not None:
            raise refuse(f"{field}.{key[:64]} is not supported", f"{field}.{key[:64]}", code="unsupported_field")


def _text_of(holder: dict[str, Any], field: str, name: str) -> str | None:
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise refuse(f"{field}.{name} must be a string", f"{field}.{name}", code="invalid_type")
    return value


def _response_format(given: Any) -> dict[str, Any] | None:
    """Here the schema lies flat beside `type`; chat wraps it."""
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise refuse("text.format must be an object with a type", "text.format", code="invalid_type")
    if given["type"] == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}
    return given


def _tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    """Here the function lies flat beside `type`; chat wraps it."""
    if tool.get("type") != "function":
        raise refuse(f"{field}.type: only functions of the client are supported", f"{field}.type")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}


def _tool_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


class ResponsesRenderer(OpenAiErrors):
    """The `response` object, whole or as events with names and sequence numbers."""

    def __init__(
        self, tokenizer: Tokenizer, generation: Generation, body: ResponsesBody, model_name: str, plan: AnswerPlan
    ) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._body = body
        self._model_name = model_name
        self._plan = plan
        self._reader = plan.reader()
        self._output = OutputItems(self._reader)
        self._id = "resp_" + uuid.uuid4().hex
        self._created = int(time.time())
        self._numbers = itertools.count()
        self._with_logprobs = generation.params.logprobs is not None

    def opening(self) -> list[bytes]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._response("in_progress", [])) for name in names]

    def chunks(self, update: Update) -> list[bytes]:
        parts = self._reader.push(update.text, last=update.finish_reason is not None)
        events = self._output.push(parts, self._logprobs(update.logprobs))
        return [self._event(name, **fields) for name, fields in events]

    def closing(self) -> list[bytes]:
        status = self._status()
        events = [self._event(name, **fields) for name, fields in self._output.close(status)]
        return [*events, self._event(f"response.{status}", response=self._ended(self._output.items))]

    def broken(self, error: OctavoError) -> list[bytes]:
        failed = self._response("failed", self._output.items)
        failed["error"] = {"code": "server_error", "message": error_object(error)["error"]["message"]}
        return [self._event("response.failed", response=failed)]

    def full(self) -> dict[str, Any]:
        output = self._generation.choices[0].output
        reader = self._plan.reader()
        items = OutputItems(reader)
        items.push(reader.push(output.text, last=True), self._logprobs(output.logprobs))
        items.close(self._status())
        return self._ended(items.items)

    def _ended(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        status = self._status()
        made = self._response(status, items)
        made["completed_at"] = int(time.time()) if status == "completed" else None
        made["incomplete_details"] = {"reason": "max_output_tokens"} if status == "incomplete" else None
        made["usage"] = self._usage()
        if self._generation.extension is not None:
            made["octavo"] = self._generation.extension
        return made

    def _status(self) -> str:
        return "incomplete" if self._generation.choices[0].finish_reason is FinishReason.LENGTH else "completed"

    def _logprobs(self, entries: Any) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        content: list[dict[str, Any]] = chat_logprobs(self._tokenizer, entries)["content"]
        return content

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self._generation.params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model_name,
            "output": output,
            "parallel_tool_calls": True if body.parallel_tool_calls is None else body.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, choice = self._generation.prompts[0], self._generation.choices[0]
        return {
            "input_tokens": len(prompt.token_ids),
            "input_tokens_details": {"cached_tokens": prompt.num_cached, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(prompt.token_ids) + choice.num_tokens,
        }

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return named_frame(name, {"sequence_number": next(self._numbers), **fields})
