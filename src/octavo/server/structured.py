"""The fields of a body that ask for a form of the answer, and the wish that they become."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from octavo.constraint import StructuredOutputsParams
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.server.schema import GenerationBody
    from octavo.server.state import ServerState

COMPILE_SECONDS = 5.0
# vLLM's older names, one field for each kind.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_WISH_FIELDS = (
    *GUIDED.values(),
    *("json_object", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"),
)
_FORMAT_KEYS = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}


def _refuse(field: str, problem: str) -> RequestError:
    return RequestError(f"{field} {problem}"[:400], param=field.partition(".")[0], code="invalid_value")


def wish_field(body: GenerationBody) -> str | None:
    """The field that asks for a form; RequestError if several do."""
    given = [name for name in ("structured_outputs", *GUIDED) if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.get("type") != "text":
        given.insert(0, "response_format")
    if len(given) > 1:
        raise _refuse(given[1], f"and {given[0]} exclude each other")
    return given[0] if given else None


def wish_of(body: GenerationBody) -> StructuredOutputsParams | None:
    """The form that a body asks for; RequestError naming the field at fault."""
    if body.response_format is not None:
        _check_format(body.response_format)
    field = wish_field(body)
    if field is None:
        return None
    try:
        if field == "response_format":
            assert body.response_format is not None
            return _wish_of_format(body.response_format)
        if field == "structured_outputs":
            return _wish_of_object(body.structured_outputs or {})
        return StructuredOutputsParams(**{GUIDED[field]: getattr(body, field)})
    except RequestError as error:
        raise named(error, field) from None


def named(error: RequestError, field: str) -> RequestError:
    """An error about a wish as one about the field of the body that holds it."""
    if error.param != "structured_outputs" or field == "structured_outputs":
        return error
    message = error.message.removeprefix("structured_outputs ")
    return RequestError(f"{field}: {message}", param=field, code=error.code)


def _wish_of_object(given: dict[str, Any]) -> StructuredOutputsParams:
    for key, value in given.items():
        if key not in _WISH_FIELDS:
            raise _refuse("structured_outputs", f"has an unknown key {key[:64]!r}")
        if key == "json" and not isinstance(value, str | dict | bool | None):
            raise _refuse("structured_outputs.json", "must be a JSON schema")
    return StructuredOutputsParams(**{key: value for key, value in given.items() if value is not None})


def _check_format(given: dict[str, Any]) -> None:
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise _refuse("response_format.type", "must be 'text', 'json_object' or 'json_schema'")
    for key in given.keys() - _FORMAT_KEYS[kind]:
        raise _refuse("response_format", f"has an unknown key {key[:64]!r}")


def _wish_of_format(given: dict[str, Any]) -> StructuredOutputsParams:
    if given["type"] == "json_object":
        return StructuredOutputsParams(json_object=True)
    described = given.get("json_schema")
    if not isinstance(described, dict):
        raise _refuse("response_format.json_schema", "must be an object")
    for key in described.keys() - {"name", "description", "schema", "strict"}:
        raise _refuse("response_format.json_schema", f"has an unknown key {key[:64]!r}")
    if not isinstance(described.get("name"), str) or not 1 <= len(described["name"]) <= 64:
        raise _refuse("response_format.json_schema.name", "must be a string of 1 to 64 characters")
    if described.get("strict") not in (None, True, False):
        raise _refuse("response_format.json_schema.strict", "must be true or false")
    schema = described.get("schema")
    if not isinstance(schema, dict):
        raise _refuse("response_format.json_schema.schema", "must be an object")
    return StructuredOutputsParams(json=schema)


async def check_wish(state: ServerState, wish: StructuredOutputsParams | None, field: str) -> None:
    """Compile in a worker thread, so that a wish that cannot be fulfilled is a 400 before the engine sees it."""
    if wish is None:
        return
    work = state.in_worker(lambda: state.grammars.compile(wish))
    try:
        await asyncio.wait_for(work, COMPILE_SECONDS)
    except RequestError as error:
        raise named(error, field) from None
    except TimeoutError:
        raise _refuse(field, f"takes more than {COMPILE_SECONDS:g} seconds to compile") from None
