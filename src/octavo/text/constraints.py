"""Grammars that rule what a model may say: wishes compiled with llguidance, one matcher per sequence."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.constraint import MAX_GRAMMAR_LENGTH, StructuredOutputsParams
from octavo.errors import RequestError
from octavo.text.json_schema import prepare_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CACHE_SIZE = 64
MAX_RULES = 1000  # lines of a Lark grammar; the compiler recurses along chains of rules
MAX_BRACKETS = 200
MAX_ERROR = 300
# Between two tokens of JSON: one blank, or a line break and its indentation. Never endless.
WHITESPACE = r"( |\r?\n[ \t]{0,20})"
# Every token whose bytes keep the text possible is allowed: the model decides how forced text is split.
_PLACE = re.compile(r"^at \d+\(\d+\): ")  # in our own text, of which the client knows nothing
HEADER = '%llguidance {"no_forcing": true}\n'


class Matcher:
    """Implements octavo.constraint.Constraint."""

    __slots__ = ("_mask", "_matcher", "_num_bytes")

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes
        self._mask: bytes | None = None  # of the present state, once it is known

    def mask(self) -> bytes:
        if self._mask is None:
            try:
                self._mask = self._matcher.compute_bitmask()
            except Exception as e:
                logger.warning("a grammar failed: %.200s", e)
                self._mask = b""
            self._mask = self._mask[: self._num_bytes]
            if self._matcher.is_error() or len(self._mask) != self._num_bytes:
                logger.warning("a grammar failed: %.200s", self._matcher.get_error())
                self._mask = bytes(self._num_bytes)
        return self._mask

    def accept(self, token_id: int) -> bool:
        self._mask = None
        return self._matcher.consume_token(token_id) and self._matcher.is_stopped() and not self._matcher.is_error()


class CompiledGrammar:
    """Implements octavo.constraint.Grammar."""

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes

    def start(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._num_bytes)


class ConstraintCompiler:
    """Implements octavo.constraint.GrammarCompiler for one vocabulary; keeps the grammars used last.

    Safe to use from several threads. The first use takes some tenths of a second (the tokenizer, if it is not made yet,
    and the trie of its vocabulary), unless `prepare` was called. Compiling takes about a millisecond; what would take
    more than some 100 ms is refused by limits on size, nesting and the compiler's own work.
    """

    def __init__(self, make_tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """`vocab_size` is that of the model's logits; beyond the tokenizer's, no token is ever allowed."""
        self._make_tokenizer = make_tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # of the cache, in which others look things up while the trie is made
        self._making = threading.Lock()
        self._trie: LLTokenizer | None = None
        self._cache: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()

    def prepare(self) -> LLTokenizer:
        with self._making:
            if self._trie is None:
                self._trie = _trie_of(self._make_tokenizer(), self._vocab_size)
            return self._trie

    def find(self, wish: StructuredOutputsParams) -> CompiledGrammar | None:
        with self._lock:
            found = self._cache.get(wish)
            if found is not None:
                self._cache.move_to_end(wish)
            return found

    def compile(self, wish: StructuredOutputsParams) -> CompiledGrammar:
        found = self.find(wish)
        if found is not None:
            return found
        made = self._compile(wish)
        with self._lock:
            self._cache[wish] = made
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return made

    def _compile(self, wish: StructuredOutputsParams) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=500_000, max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False
        )
        matcher = LLMatcher(self.prepare(), HEADER + lark_of(wish), log_level=0, limits=limits)
        if not matcher.is_error():
            first = matcher.deep_copy()
            if any(first.compute_bitmask()) and not first.is_error():
                return CompiledGrammar(matcher, (self._vocab_size + 31) // 32 * 4)
            raise _bad(f"{_subject(wish)} cannot be fulfilled: no text has that form")
        raise _bad(f"{_subject(wish)} cannot be used: {_reason(matcher.get_error())}")


def _trie_of(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    class Vocabulary:
        """What llguidance asks of a tokenizer."""

        eos_token_id = min(tokenizer.eos_token_ids, default=None)
        bos_token_id = tokenizer.bos_token_id
        tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]  # noqa: RUF012
        special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)

        def __call__(self, text: bytes | str) -> list[int]:
            whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
            return tokenizer.encode(whole, add_special_tokens=False, parse_special=False)

    return LLTokenizer(TokenizerWrapper(Vocabulary()), eos_token=sorted(tokenizer.eos_token_ids) or None)


# ---------------------------------------------------------------- wishes as Lark grammars


def lark_of(wish: StructuredOutputsParams) -> str:
    """The wish in Lark, as llguidance reads it; RequestError where it asks for too much."""
    if wish.grammar is not None:
        return _checked_grammar(wish.grammar)
    if wish.choice is not None:
        return "start: CHOICE\nCHOICE: " + " | ".join(lark_string(choice) for choice in wish.choice)
    if wish.regex is not None:
        return "start: " + lark_regex(wish.regex)
    schema: object = {"type": "object"}
    if wish.json is not None:
        try:
            schema = json.loads(wish.json) if isinstance(wish.json, str) else wish.json
        except (ValueError, RecursionError):
            raise _bad("the JSON schema is not valid JSON") from None
    return "start: " + lark_json(
        schema,
        closed=wish.disable_additional_properties,
        whitespace=None if wish.disable_any_whitespace else wish.whitespace_pattern or WHITESPACE,
    )


def lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def lark_regex(regex: str) -> str:
    from llguidance import regex_to_lark

    if "\n" in regex or "\r" in regex:
        regex = regex.replace("\n", "\\n").replace("\r", "\\r")
    return f"/{regex_to_lark(regex, '')}/"


def lark_json(schema: object, *, closed: bool = False, whitespace: str | None = WHITESPACE) -> str:
    """A schema as a part of a Lark grammar. RequestError as `prepare_schema` raises it."""
    prepared = prepare_schema(schema, closed=closed)
    options: dict[str, Any] = {"whitespace_flexible": False}
    if whitespace is not None:
        options = {"whitespace_flexible": True, "whitespace_pattern": whitespace}
    return "%json " + json.dumps({**prepared, "x-guidance": options}, ensure_ascii=False)


def _checked_grammar(text: str) -> str:
    """A grammar of a client, Lark or GBNF, if it cannot exhaust the compiler's stack."""
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as e:
            raise _bad(f"the grammar cannot be used: {_reason(str(e))}") from None
    if text.count("\n") > MAX_RULES or len(text) > MAX_GRAMMAR_LENGTH:
        raise _bad(f"the grammar has more than {MAX_RULES} lines")
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_BRACKETS:
        raise _bad(f"the grammar has more than {MAX_BRACKETS} open brackets")
    decoder = json.JSONDecoder()
    for part in text.split("%json")[1:]:
        try:
            schema, _ = decoder.raw_decode(part.lstrip())
        except (ValueError, RecursionError):
            raise _bad("the grammar has a %json that no JSON schema follows") from None
        prepare_schema(schema)
    return text


# ---------------------------------------------------------------- errors


def _bad(problem: str) -> RequestError:
    return RequestError(problem, param="structured_outputs", code="invalid_grammar")


def _subject(wish: StructuredOutputsParams) -> str:
    if wish.regex is not None:
        return "the regex"
    if wish.choice is not None:
        return "the choice"
    return "the grammar" if wish.grammar is not None else "the JSON schema"


def _reason(error: str) -> str:
    """The compiler's words on one line, without the excerpt of the grammar that follows them."""
    lines = [line.strip() for line in error.splitlines() if " | " not in line[:10] and "non-verbose" not in line]
    text = " ".join(" ".join(lines).replace("failed to compile JSON schema: ", "").split())
    return _PLACE.sub("", text)[:MAX_ERROR].rstrip(" ^")
