"""JSON schemas of clients: bounded in size, nesting and cost before they reach the compiler of grammars."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from octavo.errors import RequestError

MAX_DEPTH = 48  # of one definition
MAX_EXPANDED_DEPTH = 160  # through references; the compiler recurses
MAX_SCHEMAS = 2000
MAX_PROPERTIES = 1000  # in all objects together; the compiler's time grows with their square
MAX_VALUES = 5000  # of all enums together
MAX_MULTIPLE = 10_000  # least common multiple; the automaton has as many states

# Unknown formats are annotations (JSON Schema 2020-12, "format-annotation"), so they are left out.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_NOTES = ("x-guidance", "title", "description", "default", "examples", "$comment")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "not", "if", "then", "else")
_ALSO = ("contains", "propertyNames", "unevaluatedItems")

Schema = dict[str, Any] | bool


def _bad(problem: str) -> RequestError:
    return RequestError(f"the JSON schema {problem}"[:400], param="structured_outputs", code="invalid_json_schema")


def prepare_schema(schema: object, *, closed: bool = False) -> dict[str, Any]:
    """A copy of `schema` that the compiler can take; RequestError where it is too big or can never be fulfilled.

    `closed` forbids additional properties wherever the schema does not speak of them.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _bad("must be an object" if schema is not False else "allows nothing")
    checker = _Checker(schema, closed)
    made = checker.copy(schema, 0)
    assert isinstance(made, dict)
    checker.check_references()
    return made


class _Checker:
    """One walk over a schema; counts what costs."""

    def __init__(self, root: dict[str, Any], closed: bool) -> None:
        self._root = root
        self._closed = closed
        self._num_schemas = self._num_properties = self._num_values = 0
        self._multiples: list[Decimal] = []

    def copy(self, schema: Any, depth: int) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _bad("holds something that is neither an object nor true or false where a schema is due")
        if depth > MAX_DEPTH:
            raise _bad(f"is nested more than {MAX_DEPTH} levels deep")
        self._count(schema)
        made = {key: self._copy_keyword(key, value, depth + 1) for key, value in schema.items() if key not in _NOTES}
        known = made.get("format")
        if isinstance(known, str) and known not in FORMATS:
            del made["format"]
        if self._closed and "properties" in made:
            made.setdefault("additionalProperties", False)
        return made

    def _count(self, schema: dict[str, Any]) -> None:
        self._num_schemas += 1
        for name in ("properties", "patternProperties"):
            self._num_properties += len(schema[name]) if isinstance(schema.get(name), dict) else 0
        if isinstance(schema.get("enum"), list):
            self._num_values += len(schema["enum"])
        for value, limit, what in (
            (self._num_schemas, MAX_SCHEMAS, "schemas"),
            (self._num_properties, MAX_PROPERTIES, "properties"),
            (self._num_values, MAX_VALUES, "enum values"),
        ):
            if value > limit:
                raise _bad(f"has more than {limit} {what}")
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool):
            self._check_multiple(multiple)

    def _check_multiple(self, value: int | float) -> None:
        if not (math.isfinite(value) and 1e-9 <= value <= 1e15):
            raise _bad("has a multipleOf outside 1e-9 .. 1e15")
        self._multiples.append(Decimal(str(value)))
        scale = max(max(0, -int(m.normalize().as_tuple().exponent)) for m in self._multiples)
        whole = [int(m.scaleb(scale)) for m in self._multiples]
        if math.lcm(*whole) > MAX_MULTIPLE * math.gcd(*whole):
            raise _bad(f"has multipleOf values whose common multiple is beyond {MAX_MULTIPLE}")
        if len(whole) == 1 and whole[0] > MAX_MULTIPLE:
            raise _bad(f"has a multipleOf of more than {MAX_MULTIPLE} steps")

    def _copy_keyword(self, key: str, value: Any, depth: int) -> Any:
        if key in _MAPS and isinstance(value, dict):
            return {name: self.copy(one, depth) for name, one in value.items()}
        if key in _LISTS and isinstance(value, list):
            return [self.copy(one, depth) for one in value]
        if key == "items" and isinstance(value, list):
            return [self.copy(one, depth) for one in value]
        if key in (*_SINGLE, *_ALSO) and isinstance(value, dict | bool):
            return self.copy(value, depth)
        _check_value(value, depth)
        return value

    # ------------------------------------------------------------------ references

    def check_references(self) -> None:
        """Every reference stays inside, leads somewhere, not too deep, and to something finite."""
        targets: dict[str, Schema] = {}
        pending: list[Schema] = [self._root]
        while pending:
            for schema in _schemas_in(pending.pop()):
                pointer = schema.get("$ref")
                if isinstance(pointer, str) and pointer not in targets:
                    targets[pointer] = self._resolve(pointer)
                    pending.append(targets[pointer])
        if len(targets) > MAX_SCHEMAS:
            raise _bad("has too many references")
        _check_expanded_depth(self._root, targets)
        finite: set[str] = set()
        while found := {p for p, s in targets.items() if p not in finite and _is_finite(s, finite)}:
            finite |= found
        if not _is_finite(self._root, finite):
            raise _bad("can never be fulfilled: a reference leads back to itself without end")

    def _resolve(self, pointer: str) -> Schema:
        shown = repr(pointer[:100])
        if not pointer.startswith("#"):
            raise _bad(f"refers to {shown}, which is outside of it; nothing is fetched")
        value: Any = self._root
        for part in pointer[1:].split("/")[1:]:
            part = _unescape(part)
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, dict) and part in value:
                value = value[part]
            else:
                raise _bad(f"refers to {shown}, which is not there")
        if pointer[1:2] not in ("", "/") or not isinstance(value, dict | bool):
            raise _bad(f"refers to {shown}, which is no schema")
        return value


def _unescape(part: str) -> str:
    from urllib.parse import unquote

    return unquote(part).replace("~1", "/").replace("~0", "~")


def _check_value(value: Any, depth: int) -> None:
    if depth > 2 * MAX_DEPTH:
        raise _bad(f"holds values nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            _check_value(one, depth + 1)


def _children(schema: dict[str, Any]) -> Iterator[Any]:
    for key, value in schema.items():
        if key in _MAPS and key not in ("$defs", "definitions") and isinstance(value, dict):
            yield from value.values()
        elif (key in _LISTS or key == "items") and isinstance(value, list):
            yield from value
        elif key in (*_SINGLE, *_ALSO):
            yield value


def _schemas_in(schema: Schema) -> Iterator[dict[str, Any]]:
    """`schema` and all below it, without following references or entering definitions."""
    pending: list[Any] = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            yield one
            pending.extend(_children(one))


def _check_expanded_depth(root: Schema, targets: dict[str, Schema]) -> None:
    depths: dict[str, int] = {}  # of targets; 0 while under way, so that a cycle counts once

    def depth_of(schema: Any, above: int) -> int:
        if not isinstance(schema, dict):
            return 0
        if above > MAX_EXPANDED_DEPTH:
            raise _bad(f"is nested more than {MAX_EXPANDED_DEPTH} levels deep through its references")
        deepest = max((depth_of(child, above + 1) for child in _children(schema)), default=0)
        pointer = schema.get("$ref")
        if isinstance(pointer, str):
            if pointer not in depths:
                depths[pointer] = 0
                depths[pointer] = depth_of(targets[pointer], above + 1)
            elif above + depths[pointer] > MAX_EXPANDED_DEPTH:
                raise _bad(f"is nested more than {MAX_EXPANDED_DEPTH} levels deep through its references")
            deepest = max(deepest, depths[pointer])
        return deepest + 1

    depth_of(root, 0)


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Can a value of this schema end, given the references that can? (Least fixed point: see the caller.)"""
    if not isinstance(schema, dict):
        return True
    if "const" in schema or "enum" in schema:
        return True
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and pointer not in finite:
        return False
    if not all(_is_finite(one, finite) for one in schema.get("allOf") or ()):
        return False
    for name in ("anyOf", "oneOf"):
        if schema.get(name) and not any(_is_finite(one, finite) for one in schema[name]):
            return False
    kinds = schema.get("type")
    if isinstance(kinds, list) and not {*kinds} <= {"object", "array"}:
        return True
    return _object_is_finite(schema, finite) and _array_is_finite(schema, finite)


def _object_is_finite(schema: dict[str, Any], finite: set[str]) -> bool:
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return True
    return all(_is_finite(properties.get(name), finite) for name in required if isinstance(name, str))


def _array_is_finite(schema: dict[str, Any], finite: set[str]) -> bool:
    at_least = schema.get("minItems")
    if not isinstance(at_least, int) or at_least <= 0:
        return True
    first = schema.get("prefixItems")
    first = first if isinstance(first, list) else []
    needed = first[:at_least]
    if at_least > len(first):
        needed = [*needed, schema.get("items")]
    return all(_is_finite(one, finite) for one in needed)
