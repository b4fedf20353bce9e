"""Reads one call, {"name": ..., "arguments": {...}}, character by character, as a model writes it."""

from __future__ import annotations

import json
from enum import Enum, auto

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
MAX_DEPTH = 200


class _At(Enum):
    START = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()


class JsonValue:
    """The extent of one JSON value: strings, nesting, and where it ends. It is not checked further."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_is_scalar", "text")

    def __init__(self, first: str) -> None:
        self.text = first
        self._depth = 1 if first in "{[" else 0
        self._in_string = first == '"'
        self._is_scalar = first not in '{["'
        self._escaped = False

    @property
    def is_object(self) -> bool:
        return self.text[0] == "{"

    def ends_before(self, char: str) -> bool:
        """Numbers, true, false and null end with what follows them."""
        return self._is_scalar and char in ",}] \t\r\n"

    def push(self, char: str) -> bool:
        """Takes one more character; is the value complete with it?"""
        self.text += char
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return self._depth == 0
            return False
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class JsonCall:
    """Feed it characters until `done` or `failed`; a character that makes it fail is not part of it.

    `name` is known once its string is complete, `arguments` grows while the model writes it: the raw
    text of the object. Arguments given as a string that holds JSON are that JSON.
    """

    __slots__ = ("_at", "_key", "_only_plain_heads", "_value", "_whole", "arguments", "done", "failed", "name")

    def __init__(self, *, only_plain_heads: bool = False) -> None:
        """`only_plain_heads`: fail unless the name comes first and nothing up to it is escaped."""
        self._only_plain_heads = only_plain_heads
        self._at = _At.START
        self._key = ""
        self._value: JsonValue | None = None
        self._whole: str | None = None  # the arguments, once they are complete
        self.name: str | None = None
        self.arguments = ""
        self.done = False
        self.failed = False

    def push(self, char: str) -> None:
        at, blank = self._at, char in " \t\r\n"
        if at is _At.IN_KEY or at is _At.IN_VALUE:
            self._push_value(char)
        elif blank:
            pass
        elif at is _At.START and char == "{":
            self._at = _At.KEY
        elif at is _At.KEY and char == '"':
            self._value, self._at = JsonValue(char), _At.IN_KEY
        elif at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif at is _At.VALUE and char not in ",:}]":
            self._value, self._at = JsonValue(char), _At.IN_VALUE
            self._show_arguments()
        elif at is _At.AFTER and char == ",":
            self._at = _At.KEY
        elif char == "}" and at in (_At.KEY, _At.AFTER):
            self._finish()
        else:
            self.failed = True

    def _push_value(self, char: str) -> None:
        value = self._value
        assert value is not None
        if value.ends_before(char):
            self._end_value(value.text)
            if not self.failed:
                self.push(char)
            return
        complete = value.push(char)
        if self._at is _At.IN_VALUE:
            self._show_arguments()
        if complete and self._at is _At.IN_KEY:
            key = _string(value.text)
            self.failed = key is None or (self._only_plain_heads and self.name is None and value.text != '"name"')
            self._key, self._value, self._at = key or "", None, _At.COLON
        elif complete:
            self._end_value(value.text)

    def _show_arguments(self) -> None:
        if self._key in ARGUMENT_KEYS and self._whole is None and self._value is not None and self._value.is_object:
            self.arguments = self._value.text

    def _end_value(self, text: str) -> None:
        self._value, self._at = None, _At.AFTER
        if self._key in NAME_KEYS and self.name is None:
            self.name = _string(text)
            self.failed = not self.name or (self._only_plain_heads and "\\" in text)
        elif self._key in ARGUMENT_KEYS and self._whole is None:
            inner = _string(text) if text.startswith('"') else text
            if inner is not None and is_object(inner):
                self.arguments = self._whole = inner
            elif text == "null":
                self.arguments = self._whole = "{}"
            else:
                self.failed = True

    def _finish(self) -> None:
        if self.name is None:
            self.failed = True
            return
        if self._whole is None:
            self.arguments = "{}"
        self.done = True


def _string(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def is_object(text: str) -> bool:
    """Is it the text of one JSON object?"""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
