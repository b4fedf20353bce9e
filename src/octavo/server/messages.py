"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol. The body becomes a chat."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import OctavoError
from octavo.request import FinishReason, SamplingParams
from octavo.server.answer import AnswerPlan, answer_plan
from octavo.server.chat import chat_generation, chat_prompt
from octavo.server.failures import anthropic_error, anthropic_error_response, json_response
from octavo.server.generation import Generation, Update
from octavo.server.intake import Parsed, check_generation, check_model, read_json, respond
from octavo.server.message_blocks import chat_messages
from octavo.server.output_blocks import OutputBlocks
from octavo.server.schema import ChatBody, check_supported, refuse
from octavo.server.sse import GenerationResponse, named_frame
from octavo.server.state import ServerState
from octavo.server.translate import renamed

NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountTokensBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens. `None` always means "not given"."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    # Accepted without effect.
    cache_control: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    # Not Anthropic's: as in the other generation routes.
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    explain: bool | None = None
    container: str | dict[str, Any] | None = None
    # Accepted without effect.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None


async def create_message(request: Request, state: ServerState) -> GenerationResponse:
    body, size = await read_json(request, state, MessagesBody)
    if body.max_tokens is None:
        raise refuse("max_tokens is required", "max_tokens", code="missing_field")
    with renamed(NAMES):
        parsed = check_generation(chat_body(body), size, state)
        generation, plan = await chat_generation(state, parsed)
    return respond(state, generation, MessagesRenderer(generation, state.settings.model_name, plan), parsed.body)


async def count_tokens(request: Request, state: ServerState) -> Response:
    body, size = await read_json(request, state, CountTokensBody)
    with renamed(NAMES):
        chat = _conversation(body)
        check_model(chat.model, state)
        check_supported(chat)
        plan = answer_plan(chat, state)
        prompt = await chat_prompt(state, Parsed(chat, SamplingParams(), size), "messages", plan.tools)
    return json_response({"input_tokens": len(prompt.token_ids)})


def chat_body(body: MessagesBody) -> ChatBody:
    """The chat that asks for the same. Raises RequestError."""
    if body.container is not None:
        raise refuse("container is not supported", "container", code="unsupported_field")
    chat = _conversation(body)
    chat.max_completion_tokens = body.max_tokens
    chat.stop = body.stop_sequences
    for name in (
        "stream", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "cache_salt", "priority", "explain",
    ):  # fmt: skip
        setattr(chat, name, getattr(body, name))
    return chat


def _conversation(body: CountTokensBody) -> ChatBody:
    """Everything that becomes part of the prompt. A last turn of the assistant is continued."""
    for name in ("context_management", "mcp_servers"):
        if getattr(body, name):
            raise refuse(f"{name} is not supported", name, code="unsupported_field")
    if body.thinking is not None and body.thinking.get("type") != "disabled":
        raise refuse("thinking other than {'type': 'disabled'} is not supported", "thinking", code="unsupported_field")
    messages = chat_messages(body.system, body.messages)
    last = messages[-1]
    chat = ChatBody(
        model=body.model,
        messages=messages,
        continue_final_message=(last["role"] == "assistant" and "tool_calls" not in last) or None,
        tools=None if body.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        response_format=_response_format(body.output_config or {}),
    )
    if body.tool_choice is not None:
        chat.tool_choice, chat.parallel_tool_calls = _tool_choice(body.tool_choice)
    return chat


def _tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise refuse(f"{field}.type: only tools of the client are supported", f"{field}.type")
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise refuse(f"{field} must have a name and an input_schema", field)
    wanted = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    function = {ours: tool[theirs] for theirs, ours in wanted.items() if tool.get(theirs) is not None}
    return {"type": "function", "function": function}


def _tool_choice(given: dict[str, Any]) -> tuple[str | dict[str, Any], bool | None]:
    kind, name = given.get("type"), given.get("name")
    parallel = False if given.get("disable_parallel_tool_use") is True else None
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}, parallel
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise refuse("tool_choice.type must be 'auto', 'any', 'none' or 'tool' with a name", "tool_choice.type")
    return TOOL_CHOICES[kind], parallel


def _response_format(config: dict[str, Any]) -> dict[str, Any] | None:
    for name, value in config.items():
        if name != "format" and value is not None:
            raise refuse(f"output_config.{name[:40]} is not supported", "output_config", code="unsupported_field")
    given = config.get("format")
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise refuse("output_config.format must be {'type': 'json_schema', 'schema': ...}", "output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"], "strict": True}}


class MessagesRenderer:
    """The `message` object, whole or as Anthropic's events."""

    def __init__(self, generation: Generation, model_name: str, plan: AnswerPlan) -> None:
        self._generation = generation
        self._model_name = model_name
        self._plan = plan
        self._reader = plan.reader()
        self._output = OutputBlocks(self._reader)
        self._id = "msg_" + uuid.uuid4().hex

    def opening(self) -> list[bytes]:
        return [named_frame("message_start", {"message": self._message([], None, None, 0)})]

    def chunks(self, update: Update) -> list[bytes]:
        parts = self._reader.push(update.text, last=update.finish_reason is not None)
        return [named_frame(name, fields) for name, fields in self._output.push(parts)]

    def closing(self) -> list[bytes]:
        events = [named_frame(name, fields) for name, fields in self._output.close()]
        reason, sequence = self._stop(self._output)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = self._usage(self._generation.choices[0].num_tokens)
        return [
            *events,
            named_frame("message_delta", {"delta": delta, "usage": usage}),
            named_frame("message_stop", self._extension()),
        ]

    def broken(self, error: OctavoError) -> list[bytes]:
        return [named_frame("error", anthropic_error(error))]

    def refusal(self, error: OctavoError) -> Response:
        return anthropic_error_response(error)

    def full(self) -> dict[str, Any]:
        choice = self._generation.choices[0]
        reader = self._plan.reader()
        output = OutputBlocks(reader)
        output.push(reader.push(choice.output.text, last=True))
        output.close()
        return self._message(output.blocks, *self._stop(output), choice.num_tokens) | self._extension()

    def _extension(self) -> dict[str, Any]:
        extension = self._generation.extension
        return {} if extension is None else {"octavo": extension}

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, num_tokens: int
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(num_tokens),
        }

    def _stop(self, output: OutputBlocks) -> tuple[str, str | None]:
        choice = self._generation.choices[0]
        if choice.finish_reason is FinishReason.LENGTH:
            return "max_tokens", None
        stop = choice.output.stop_reason
        if isinstance(stop, str):
            return "stop_sequence", stop
        return ("tool_use" if output.blocks and output.blocks[-1]["type"] == "tool_use" else "end_turn"), None

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        """Here `input_tokens` does not count those read from the cache."""
        prompt = self._generation.prompts[0]
        return {
            "input_tokens": len(prompt.token_ids) - prompt.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": prompt.num_cached,
            "output_tokens": num_tokens,
        }
