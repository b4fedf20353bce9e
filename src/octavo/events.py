"""What the engine tells the outside: one OutputEvent per sequence and step that has news; and hooks for observers."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from octavo.plan import TokenLogprobs
from octavo.request import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """News of one sequence. The one with a `finish_reason` is its last.

    `token_ids` are the new tokens (usually one; none in a pure prompt-logprobs or terminal event),
    `logprobs` is parallel to them when logprobs were asked for. `prompt_logprobs` are the new entries
    of the prompt (position 1, 2, ... in order, over all events). `num_cached` is the number of hit
    tokens at first admission. `stop_reason` is the stop token id (or, from the text layer, the stop
    string) that ended the sequence. `error` is set iff finish_reason is ERROR. `num_shared` counts the
    prompt tokens that this sample did not compute because a sibling had. `score` is that of a beam search.
    `embedding` (float32, little-endian) comes with the end of a request with pooling.
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
    embedding: bytes | None = None
    num_shared: int = 0
    score: float | None = None


def news(
    seq: Sequence,
    scores: tuple[TokenLogprobs, ...],
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    score: float | None = None,
    embedding: bytes | None = None,
) -> OutputEvent:
    """What there is to tell of `seq` after a step; its end, if it has ended."""
    return OutputEvent(
        seq.request.request_id,
        seq.index,
        token_ids,
        logprobs,
        scores,
        seq.num_cached or 0,
        seq.finish_reason,
        seq.stop_reason,
        num_shared=seq.num_shared,
        score=score,
        embedding=embedding,
    )


def terminal_events(sequences: Iterable[Sequence], error: str | None = None) -> list[OutputEvent]:
    """The last events of sequences that ended without a token; nobody knows of the further beams of a search."""
    return [
        OutputEvent(
            seq.request.request_id,
            seq.index,
            num_cached=seq.num_cached or 0,
            finish_reason=seq.finish_reason,
            error=error,
        )
        for seq in sequences
        if seq.index < seq.request.params.num_outputs
    ]


class WaitReason(enum.StrEnum):
    """What a waiting sequence waits for."""

    LINE = "line"  # others are before it
    BUDGET = "budget"  # the step's tokens were given out
    PLACES = "places"  # max_num_seqs sequences run
    BLOCKS = "blocks"  # its known tokens need more KV blocks than are free
    GROWTH = "growth"  # blocks are free, but those that run are expected to need them
    PREFIX = "prefix"  # another sequence is computing the prompt that this one will share


class Observer:
    """Hears what the scheduler does. Every method does nothing unless overridden.

    The scheduler holds one or None; with None a hook costs a comparison. A decode step calls nothing
    but `step_committed`, so the price of observing does not grow with the batch.
    """

    def queued(self, samples: ListLike[Sequence]) -> None:
        """A request joined the line with these sequences."""

    def held(self, seq: Sequence, reason: WaitReason) -> None:
        """The front of the line was not admitted in this step; called in every such step."""

    def admitted(self, seq: Sequence, num_hits: int, *, first: bool) -> None:
        """`seq` runs, with so many hit tokens. `first`: not again after a preemption."""

    def computing(self, seq: Sequence, num_tokens: int) -> None:
        """This step computes a chunk of `seq` that is not merely its newest token."""

    def preempted(self, seq: Sequence, num_lost: int) -> None:
        """`seq` waits again; the KV of `num_lost` tokens is given up."""

    def reclaimed(self, seq: Sequence, num_lost: int) -> None:
        """`seq`, preempted before, still held some KV; that of `num_lost` tokens is now given up too."""

    def first_token(self, seq: Sequence) -> None:
        """The step just committed drew the first token of `seq`."""

    def finished(self, seq: Sequence) -> None:
        """`seq` ended, see `seq.finish_reason`."""

    def step_committed(self) -> None:
        """A step ended, after its other hooks."""
