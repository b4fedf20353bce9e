"""The text side of one sequence: the engine's events in, text deltas out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.events import OutputEvent
from octavo.plan import TokenLogprobs
from octavo.request import FinishReason, SamplingParams
from octavo.text.stream import Detokenizer, StopScanner

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TextDelta:
    """News of one sequence as text. `token_ids` may run ahead of `text`, of which some can be held back.

    `finish_reason` is set in the last delta only. `stopped_by_text`: a stop string ended the sequence
    while the engine goes on with it, so the caller must call `Engine.finish_sequence`.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stopped_by_text: bool = False


class SequenceOutput:
    """Text, tokens and logprobs of one sequence so far; every delta of a stream comes from `push`.

    Only generated text is decoded and searched: the text is that of the generated tokens' bytes, so half
    a character at the end of the prompt leaves U+FFFD here. A stop string completed before `min_tokens`
    tokens is kept as ordinary text. A stop string completed by the last token that a limit allows gives
    finish reason STOP. The text of the token that stopped the sequence is dropped, unless the client
    asked for it: `include_stop_str_in_output` and one of `stop_token_ids` (and, for a special token,
    `skip_special_tokens` off).
    """

    __slots__ = (
        "_detokenizer",
        "_eos_token_ids",
        "_params",
        "_parts",
        "_scanner",
        "finish_reason",
        "logprobs",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        # Text that follows visible text keeps its leading space.
        at_start = tokenizer.strips_leading_space and all(tokenizer.is_special(i) for i in prompt_token_ids)
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, at_start=at_start)
        self._scanner = StopScanner(params.stop) if params.stop else None
        self._params = params
        self._eos_token_ids = tokenizer.eos_token_ids
        self._parts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """All text so far, without what is held back."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, event: OutputEvent) -> TextDelta:
        """Takes the next event of this sequence; events after the end are ignored."""
        if self.finish_reason is not None:
            return TextDelta()
        text, num_used, stop = self._read(event)
        reason = event.finish_reason
        if reason is not None and stop is None:
            tail, stop = self._scan(self._detokenizer.flush())
            text += tail
            if stop is None and self._scanner is not None:
                text += self._scanner.flush()
        delta = TextDelta(text, event.token_ids[:num_used], (event.logprobs or ())[:num_used])
        if stop is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, stop
            delta.stopped_by_text = reason is None
            if self._params.include_stop_str_in_output:
                delta.text += stop
        elif reason is not None:
            delta.finish_reason, delta.stop_reason = reason, event.stop_reason
        self._add(delta)
        return delta

    def _read(self, event: OutputEvent) -> tuple[str, int, str | None]:
        """The event's tokens as text: (text to show, tokens used, stop string found)."""
        token_ids = event.token_ids
        num_text = len(token_ids)
        if event.finish_reason is FinishReason.STOP and token_ids and self._hides(token_ids[-1]):
            num_text -= 1
        text = ""
        for i in range(num_text):
            piece = self._detokenizer.push(token_ids[i])
            if self._scanner is not None:
                piece, stop = self._scan(piece, num_tokens=len(self.token_ids) + i + 1)
                if stop is not None:
                    return text + piece, i + 1, stop
            text += piece
        return text, len(token_ids), None

    def _hides(self, token_id: int) -> bool:
        """Is the last token, with which the engine stopped, a stop and not the end of what a grammar wanted?"""
        params = self._params
        if params.structured_outputs is not None and token_id not in self._eos_token_ids | {*params.stop_token_ids}:
            return False
        return not (params.include_stop_str_in_output and token_id in params.stop_token_ids)

    def _scan(self, text: str, num_tokens: int | None = None) -> tuple[str, str | None]:
        if self._scanner is None or not text:
            return text, None
        return self._scanner.push(text, armed=num_tokens is None or num_tokens >= self._params.min_tokens)

    def _add(self, delta: TextDelta) -> None:
        if delta.text:
            self._parts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
