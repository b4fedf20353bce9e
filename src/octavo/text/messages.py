"""Checks chat messages as clients send them and gives templates the shape they expect."""

from __future__ import annotations

import json
from typing import Any

from octavo.errors import RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: object, template: str) -> list[dict[str, Any]]:
    """A fresh list of messages whose contents are texts; RequestError naming the message at fault.

    Text parts are joined with a newline. Content may be null only where an assistant calls tools; it is
    then an empty text. Keys that are null are left out, since templates ask whether they are there.
    "developer" is "system" unless the template knows it. Arguments of tool calls that are JSON objects
    in text become objects, which is what templates write out.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must hold at least one message", param="messages", code="invalid_value")
    return [_check_message(message, f"messages[{i}]", template) for i, message in enumerate(messages)]


def _refuse(field: str, problem: str) -> RequestError:
    return RequestError(f"{field} {problem}", param=field, code="invalid_value")


def _check_message(message: object, field: str, template: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _refuse(field, "must be an object")
    role = message.get("role")
    if role not in _ROLES:
        raise _refuse(f"{field}.role", "is missing" if role is None else f"must be one of {', '.join(_ROLES)}")
    checked = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and "developer" not in template:
        checked["role"] = "system"
    calls = message.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = _check_tool_calls(calls, f"{field}.tool_calls")
    content = message.get("content")
    if content is None and role == "assistant" and calls:
        content = ""
    checked["content"] = _check_content(content, f"{field}.content")
    return checked


def _check_content(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise _refuse(field, "must not be null")
    if not isinstance(content, list | tuple) or not content:
        raise _refuse(field, "must be a string or a list with at least one text part")
    return "\n".join(_part_text(part, f"{field}[{i}]") for i, part in enumerate(content))


def _part_text(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _refuse(field, "must be an object")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        shown = f"of type {kind[:40]!r}" if isinstance(kind, str) else "without a type"
        raise _refuse(field, f"is a part {shown}; this model reads text only")
    text = part.get(kind)
    if not isinstance(text, str):
        raise _refuse(f"{field}.{kind}", "must be a string")
    return text


def _check_tool_calls(calls: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise _refuse(field, "must be a list")
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise _refuse(f"{field}[{i}].function", "must be an object")
        if not isinstance(function.get("name"), str):
            raise _refuse(f"{field}[{i}].function.name", "must be a string")
        arguments = _parsed_arguments(function.get("arguments"))
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _parsed_arguments(arguments: object) -> object:
    """The object that a JSON text holds; a text that holds none stays as it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
