"""What the engine tells the outside: one OutputEvent per sequence and step that has news."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.plan import TokenLogprobs
from octavo.request import FinishReason


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """News of one sequence. The one with a `finish_reason` is its last.

    `token_ids` are the new tokens (usually one; none in a pure prompt-logprobs or terminal event),
    `logprobs` is parallel to them when logprobs were asked for. `prompt_logprobs` are the new entries
    of the prompt (position 1, 2, ... in order, over all events). `num_cached` is the number of hit
    tokens at first admission. `stop_reason` is the stop token id (or, from the text layer, the stop
    string) that ended the sequence. `error` is set iff finish_reason is ERROR.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
