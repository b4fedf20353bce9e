"""The `input` of the Responses API as the messages of a chat."""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError
from octavo.server.schema import refuse

ROLES = ("user", "assistant", "system", "developer")
# Their text is what the model should see; other parts (images, files, audio) are refused by name.
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def input_messages(given: str | list[dict[str, Any]] | None, instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages; RequestError naming the item at fault."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if given is None:
        raise refuse("input is required", "input", code="missing_field")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise refuse("input must hold at least one item", "input", code="missing_field")
    for i, item in enumerate(given):
        _add_item(messages, item, f"input[{i}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], field: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(_message(item, field))
    elif kind == "function_call":
        call = {
            "id": _text(item, "call_id", field),
            "type": "function",
            "function": {"name": _text(item, "name", field), "arguments": _text(item, "arguments", field)},
        }
        # Calls of one turn, and the text before them, are one message to a chat template.
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{field}.output")
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", field), "content": content})
    elif kind != "reasoning":  # earlier thoughts are no part of the conversation
        raise _wrong(f"{field}.type", f"{_shown(kind)} is not supported")


def _message(item: dict[str, Any], field: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise _wrong(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    return {"role": role, "content": _content(item.get("content"), f"{field}.content")}


def _content(content: object, field: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(field, "must be a string or a list with at least one text part")
    return [_part(part, f"{field}[{i}]") for i, part in enumerate(content)]


def _part(part: object, field: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise _wrong(field, "must be an object")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise _wrong(f"{field}.type", f"{_shown(kind)} is not supported; this model reads text only")
    return {"type": "text", "text": _text(part, TEXT_PARTS[kind], field)}


def _text(holder: dict[str, Any], name: str, field: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{field}.{name}", "must be a string")
    return value


def _shown(kind: object) -> str:
    return repr(kind[:40]) if isinstance(kind, str) else "something without a name"


def _wrong(field: str, problem: str) -> RequestError:
    return refuse(f"{field}: {problem}", field)
