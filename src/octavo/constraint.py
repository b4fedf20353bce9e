"""What a sequence may say: the wish of a client, and the seam to whatever enforces it."""

from __future__ import annotations

import json as _json
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.errors import RequestError

MAX_CHOICES = 4096
MAX_GRAMMAR_LENGTH = 128 * 1024  # characters of a schema, a regex, all choices together or a grammar

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_FLAGS = ("disable_any_whitespace", "disable_additional_properties")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that the generated text must have: exactly one of five. Names are vLLM's.

    `json`: a JSON schema (object, or its text). `regex`: the whole text matches. `choice`: the text is one
    of these. `grammar`: in Lark, as llguidance reads it. `json_object`: some JSON object. The others
    shape JSON only: no blanks between its tokens, a regex for them, no properties besides those named.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _bad(f"needs exactly one of {', '.join(_KINDS)}; {len(given)} are given")
        if self.choice is not None:
            self._check_choice()
        elif self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", _dump(self.json))
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise _bad(f"{name} must be a string")
            if len(value) > MAX_GRAMMAR_LENGTH:
                raise _bad(f"{name} has more than {MAX_GRAMMAR_LENGTH} characters")
            if not _is_unicode(value):
                raise _bad(f"{name} is not valid Unicode")
        for name in (*_FLAGS, "json_object"):
            if getattr(self, name) not in (True, False, None):
                raise _bad(f"{name} must be true or false")

    def _check_choice(self) -> None:
        choice: object = self.choice
        if not isinstance(choice, list | tuple) or not choice or not all(isinstance(c, str) and c for c in choice):
            raise _bad("choice must hold non-empty strings")
        if len(choice) > MAX_CHOICES or sum(map(len, choice)) > MAX_GRAMMAR_LENGTH:
            raise _bad(f"choice takes at most {MAX_CHOICES} strings and {MAX_GRAMMAR_LENGTH} characters in all")
        if not all(map(_is_unicode, choice)):
            raise _bad("choice is not valid Unicode")
        object.__setattr__(self, "choice", tuple(choice))


def _bad(problem: str) -> RequestError:
    return RequestError(f"structured_outputs {problem}", param="structured_outputs", code="invalid_value")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text) if not text.isascii() else True


def _dump(schema: object) -> str:
    try:
        return _json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise _bad("json is not a JSON schema") from None


class Constraint(Protocol):
    """Where one sequence stands in its grammar: a pure function of its generated tokens.

    Nothing here raises: after a fault the mask is empty, and so that sequence ends with an error.
    """

    def mask(self) -> bytes:
        """One bit per token of the vocabulary, lowest bit first, in whole 32-bit words: may it come next?"""
        ...

    def accept(self, token_id: int) -> bool:
        """The sequence goes on with this token. True: its text is complete and nothing may follow."""
        ...


class Grammar(Protocol):
    """A compiled wish. Immutable; any number of sequences start from it."""

    def start(self) -> Constraint: ...


class GrammarCompiler(Protocol):
    def compile(self, wish: StructuredOutputsParams) -> Grammar:
        """Raises RequestError where the wish is wrong, cannot be fulfilled or asks for too much."""
        ...

    def find(self, wish: StructuredOutputsParams) -> Grammar | None:
        """What `compile` would return, if it had nothing to do."""
        ...
