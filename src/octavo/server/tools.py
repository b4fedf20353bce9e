"""Tools of a chat: what a body asks for, the grammar that enforces it, and how the template is told of them."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.text.tool_calls import format_of

if TYPE_CHECKING:
    from octavo.server.schema import ChatBody

MAX_TOOLS = 256
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "json")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def _refuse(field: str, problem: str) -> RequestError:
    param = re.split(r"[.\[]", field)[0]
    return RequestError(f"{field} {problem}"[:400], param=param, code="invalid_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """The tools of one request. `forced` are the names of which one must be called; empty: the model decides.

    `strict` are those whose arguments follow their schema also where the model decides. `named` tells that the client
    named the function, which changes the finish reason (OpenAI's table).
    """

    tools: list[dict[str, Any]]
    schemas: dict[str, Any]
    format: str
    strict: frozenset[str] = frozenset()
    forced: tuple[str, ...] = ()
    named: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.schemas)

    @property
    def is_free(self) -> bool:
        """May the model call or not, and how it likes?"""
        return not self.forced and not self.strict

    def new_call_id(self) -> str:
        """Mistral's templates insist on nine characters."""
        return uuid.uuid4().hex[:9] if self.format == "mistral" else "call_" + uuid.uuid4().hex[:24]


def tool_plan(body: ChatBody, *, parser: str, template: str | None) -> ToolPlan | None:
    """None without tools, or where `tool_choice` is "none". RequestError naming what is wrong."""
    schemas, strict = {}, set()
    for i, tool in enumerate(body.tools or ()):
        name, schema, is_strict = _read_tool(tool, f"tools[{i}]")
        if name in schemas:
            raise _refuse(f"tools[{i}].function.name", "is the name of another tool too")
        schemas[name] = schema
        strict |= {name} if is_strict else set()
    if len(schemas) > MAX_TOOLS:
        raise _refuse("tools", f"takes at most {MAX_TOOLS} functions")
    forced, named = _read_choice(body.tool_choice, tuple(schemas))
    if not schemas or body.tool_choice == "none":
        return None
    return ToolPlan(
        tools=list(body.tools or ()),
        schemas=schemas,
        format=format_of(template) if parser == "auto" else parser,
        strict=frozenset(strict),
        forced=forced,
        named=named,
        parallel=body.parallel_tool_calls is not False,
    )


def _read_tool(tool: Any, field: str) -> tuple[str, Any, bool]:
    """(name, schema of the arguments, is it strict?)"""
    if not isinstance(tool, dict):
        raise _refuse(field, "must be an object")
    if tool.get("type") != "function":
        raise _refuse(f"{field}.type", "must be 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _refuse(f"{field}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refuse(f"{field}.function.name", "must be 1 to 64 letters, digits, - and _")
    if not isinstance(function.get("description"), str | None):
        raise _refuse(f"{field}.function.description", "must be a string")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise _refuse(f"{field}.function.parameters", "must be a JSON schema")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _refuse(f"{field}.function.strict", "must be true or false")
    return name, parameters or {"type": "object", "properties": {}, "additionalProperties": False}, strict is True


def _read_choice(choice: Any, names: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """(names of which one must be called, is it one that the client named)"""
    if choice in (None, "auto", "none"):
        return (), False
    if choice != "required" and not isinstance(choice, dict):
        raise _refuse("tool_choice", "must be 'none', 'auto', 'required' or a function")
    if not names:
        raise _refuse("tool_choice", "needs tools")
    if choice == "required":
        return names, False
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise _refuse("tool_choice", 'must be {"type": "function", "function": {"name": ...}}')
    if name not in names:
        raise _refuse("tool_choice", "names a function that is not among the tools")
    return (name,), True


# ---------------------------------------------------------------- prompts


def with_tool_instructions(messages: list[dict[str, Any]], plan: ToolPlan) -> list[dict[str, Any]]:
    """For templates that know nothing of tools: the system message tells of them, in the words of plain JSON."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in plan.tools)
    text = (
        f"You can call these functions:\n{functions}\nTo call one, answer with nothing but "
        '{"name": the name of the function, "arguments": an object with its arguments}.'
    )
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
