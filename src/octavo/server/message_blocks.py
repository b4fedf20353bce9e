"""The `system` and `messages` of Anthropic's Messages API as the messages of a chat."""

from __future__ import annotations

import json
from typing import Any

from octavo.errors import RequestError
from octavo.server.schema import refuse

# Earlier thoughts are no part of the conversation.
LEFT_OUT = ("thinking", "redacted_thinking")


def chat_messages(
    system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Chat messages; RequestError naming the block at fault.

    Turns of one role in a row become one, as Anthropic does. A `tool_result` becomes a message of its own.
    """
    if not messages:
        raise refuse("messages must hold at least one message", "messages", code="missing_field")
    chat: list[dict[str, Any]] = []
    if system:
        chat.append({"role": "system", "content": _texts(system, "system")})
    for i, message in enumerate(messages):
        _add_message(chat, message, f"messages[{i}]")
    if not chat or chat[-1]["role"] == "system":
        raise refuse("messages must hold a block that the model can read", "messages")
    for message in chat:
        message["content"] = message["content"] or None
    return chat


def _add_message(chat: list[dict[str, Any]], message: dict[str, Any], field: str) -> None:
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise _wrong(f"{field}.role", "must be 'user', 'assistant' or 'system'")
    for name in message:
        if name not in ("role", "content"):
            raise _wrong(f"{field}.{name[:40]}", "is not a known field")
    content = message.get("content")
    if isinstance(content, str):
        _turn(chat, role)["content"].append({"type": "text", "text": content})
        return
    if not isinstance(content, list) or not content:
        raise _wrong(f"{field}.content", "must be a string or a list with at least one block")
    for i, block in enumerate(content):
        where = f"{field}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            _turn(chat, role)["content"].append(_text_part(block, where))
        elif kind == "tool_use" and role == "assistant":
            _turn(chat, role).setdefault("tool_calls", []).append(_call(block, where))
        elif kind == "tool_result" and role == "user":
            chat.append(_result(block, where))
        elif kind not in LEFT_OUT or role != "assistant":
            shown = repr(kind[:40]) if isinstance(kind, str) else "without a type"
            raise _wrong(f"{where}.type", f"a block {shown} is not supported in a message of the {role}")


def _turn(chat: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The message that a block of `role` belongs to."""
    if not chat or chat[-1]["role"] != role or role == "system":
        chat.append({"role": role, "content": []})
    return chat[-1]


def _texts(given: object, field: str) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list):
        raise _wrong(field, "must be a string or a list of text blocks")
    return [_text_part(block, f"{field}[{i}]") for i, block in enumerate(given)]


def _text_part(block: object, field: str) -> dict[str, Any]:
    if not isinstance(block, dict) or block.get("type") != "text":
        raise _wrong(field, "must be a text block; this model reads text only")
    return {"type": "text", "text": _text(block, "text", field)}


def _call(block: dict[str, Any], field: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise _wrong(f"{field}.input", "must be an object")
    function = {"name": _text(block, "name", field), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _text(block, "id", field), "type": "function", "function": function}


def _result(block: dict[str, Any], field: str) -> dict[str, Any]:
    content = block.get("content")
    parts = _texts("" if content is None else content, f"{field}.content")
    return {
        "role": "tool",
        "tool_call_id": _text(block, "tool_use_id", field),
        "content": parts or [{"type": "text", "text": ""}],
    }


def _text(holder: dict[str, Any], name: str, field: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{field}.{name}", "must be a string")
    return value


def _wrong(field: str, problem: str) -> RequestError:
    return refuse(f"{field}: {problem}", field)
