"""Log-probabilities in the shapes of the OpenAI API (chat and completions) and of vLLM (prompt_logprobs)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from octavo.plan import TokenLogprobs
from octavo.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """JSON has no infinity; -inf and NaN become -9999.0."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; where its bytes are no UTF-8 text of their own, `bytes:\\xe2\\x82` as OpenAI writes it."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of chat; `bytes` of all tokens concatenate to the UTF-8 of the text."""
    content = []
    for entry in entries:
        token = _chat_token(tokenizer, entry.token_id, entry.logprob)
        token["top_logprobs"] = [_chat_token(tokenizer, *pair) for pair in entry.top]
        content.append(token)
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, then {token id: {logprob, rank, decoded_token}}."""
    shown: list[dict[str, Any] | None] = [None]
    for entry in entries:
        table = {str(i): _ranked(tokenizer, i, lp, rank) for rank, (i, lp) in enumerate(entry.top, 1)}
        table.setdefault(str(entry.token_id), _ranked(tokenizer, entry.token_id, entry.logprob, entry.rank))
        shown.append(table)
    return shown


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_label(tokenizer, token_id)}


class OffsetCounter:
    """text_offset of the completions API: where each token starts in the text, in characters.

    Walks along the text, since token bytes and text differ in places: special tokens may be left out,
    a leading space may be dropped, a character may be spread over several tokens.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = start

    def step(self, token_id: int, text: str) -> int:
        """The offset of this token; `text` is all text so far, up to at least this token's end where known."""
        offset = self.offset
        piece = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if self._tokenizer.is_special(token_id) and not text.startswith(piece, offset):
            piece = ""
        elif piece[:1] == " " and offset == 0 and text[:1] != " ":
            piece = piece[1:]
        self.offset += len(piece)
        return offset


class CompletionLogprobs:
    """`choices[].logprobs` of completions, built token by token; `take` hands out what is new (for streams)."""

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self._tokenizer = tokenizer
        self._generated = OffsetCounter(tokenizer, start)
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], text: str) -> None:
        """The echoed prompt: its first token has no probability."""
        counter = OffsetCounter(self._tokenizer)
        for i, token_id in enumerate(token_ids):
            self._tokens.append(token_label(self._tokenizer, token_id))
            self._offsets.append(min(counter.step(token_id, text), len(text)))
            entry = entries[i - 1] if 0 < i <= len(entries) else None
            self._logprobs.append(None if entry is None else finite(entry.logprob))
            self._tops.append(None if entry is None else self._top(entry))

    def add(self, entries: Sequence[TokenLogprobs], text: str) -> None:
        """Generated tokens; `text` is the whole text so far, echo included."""
        for entry in entries:
            self._tokens.append(token_label(self._tokenizer, entry.token_id))
            self._offsets.append(self._generated.step(entry.token_id, text))
            self._logprobs.append(finite(entry.logprob))
            self._tops.append(self._top(entry))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        if not entry.top:
            return {}
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            top.setdefault(token_label(self._tokenizer, token_id), finite(logprob))
        top.setdefault(token_label(self._tokenizer, entry.token_id), finite(entry.logprob))
        return top

    def take(self) -> dict[str, Any]:
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._clear()
        return taken
