"""Beam search: which continuations of a request's beams go on, and when the search is settled.

Scores, `length_penalty` and `early_stopping` are those of transformers 5.24 (`GenerationMixin._beam_search`);
`tests/models/test_beam_oracle.py` holds this to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from octavo.errors import RequestError
from octavo.kv.tables import BlockTables
from octavo.plan import TokenLogprobs
from octavo.request import FinishReason, Request, Sequence

MAX_CANDIDATES = 1024
"""Most tokens with logprobs that a backend returns for one row."""

_UNFILLED = -1.0e9  # what transformers takes as the score of a result that is not there yet


@dataclass(frozen=True, slots=True)
class Path:
    """The generated tokens of a beam, last one first: beams that fork share their past."""

    entry: TokenLogprobs
    before: Path | None

    def entries(self) -> tuple[TokenLogprobs, ...]:
        found: list[TokenLogprobs] = []
        path: Path | None = self
        while path is not None:
            found.append(path.entry)
            path = path.before
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Beam:
    """A beam after a step: the beam it goes on from, its tokens, and the sum of their log-probabilities."""

    parent: int
    path: Path
    total: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam. `score` = sum of log-probabilities / number of generated tokens ** length_penalty.

    The token that ended it counts in both.
    """

    path: Path
    score: float
    reason: FinishReason
    stop_reason: int | None = None


def num_candidates(request: Request) -> int:
    """How many of the most probable tokens of each beam a step of the search needs.

    (number of end tokens + 1) * width, at least twice the width: even if all end tokens are among them,
    `width` beams are left to go on. Those that may not be drawn before `min_tokens` come on top.
    """
    num_end_ids = len(request.end_ids)
    return max(2, 1 + num_end_ids) * request.params.num_sequences + (num_end_ids if request.params.min_tokens else 0)


class BeamSearch:
    """The search of one request: its sequences are the beams, and all of them take every step together."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.width = request.params.num_sequences
        self.sequences = [Sequence(request, index) for index in range(self.width)]  # that of beam i at place i
        self.restart()

    def restart(self) -> None:
        """Back to the prompt. The search is deterministic, so it finds the same again."""
        self.sequences.sort(key=lambda seq: seq.index)
        for seq in self.sequences:
            seq.token_ids = list(self.request.prompt_token_ids)
            del seq.block_hashes[:]
        # As in transformers, all beams are there from the start, and only the first one counts.
        self.totals = [0.0] + [float("-inf")] * (self.width - 1)
        self.paths: list[Path | None] = [None] * self.width
        self.finished: list[Hypothesis] = []  # best first, at most `width`
        self.length = 0  # generated tokens
        self.settled = False
        self._can_improve = True

    def advance(self, tops: ListLike[ListLike[tuple[int, float]]]) -> list[Beam]:
        """Take one step: `tops[i]` are the most probable next tokens of beam i, best first.

        Returns the beams that go on, best first; none when the search is settled.
        """
        candidates = self._candidates(tops)
        self.length += 1
        kept: list[Beam] = []
        ended: list[Hypothesis] = []
        for place, beam in enumerate(candidates):
            reason = self._reason_to_end(beam.path.entry.token_id)
            if reason is None:
                kept.append(beam)
            elif place < self.width:  # those behind are only there to have enough that go on
                stop = beam.path.entry.token_id if reason is FinishReason.STOP else None
                stop = stop if stop in self.request.params.stop_token_ids else None
                score = beam.total / self.length**self.request.params.length_penalty
                ended.append(Hypothesis(beam.path, score, reason, stop))
        any_goes_on = bool(kept)
        kept = kept[: self.width]
        self._enter(ended)
        self._look_ahead(kept[0].total if kept else _UNFILLED)
        full = len(self.finished) == self.width and self.request.params.early_stopping is True
        if not (self._can_improve and any_goes_on) or full:
            self.settled = True
            return []
        self.totals, self.paths = [b.total for b in kept], [b.path for b in kept]
        return kept

    def _candidates(self, tops: ListLike[ListLike[tuple[int, float]]]) -> list[Beam]:
        params = self.request.params
        banned = self.request.end_ids if self.length < params.min_tokens else frozenset()
        num_shown = params.logprobs or 0
        found: list[tuple[float, int, int]] = []
        for i, (total, top) in enumerate(zip(self.totals, tops, strict=True)):
            for rank, (token_id, logprob) in enumerate(top):
                if token_id not in banned and total + logprob > float("-inf"):
                    found.append((-(total + logprob), i, rank))
        found.sort()
        beams = []
        for negative, i, rank in found[: max(2, 1 + len(self.request.end_ids)) * self.width]:
            token_id, logprob = tops[i][rank]
            entry = TokenLogprobs(token_id, logprob, rank + 1, tuple(tops[i][:num_shown]))
            beams.append(Beam(i, Path(entry, self.paths[i]), -negative))
        return beams

    def _reason_to_end(self, token_id: int) -> FinishReason | None:
        if token_id in self.request.end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.request.max_tokens else None

    def _enter(self, ended: Iterable[Hypothesis]) -> None:
        """Keep the best `width` results; of equal scores the earlier one."""
        full = len(self.finished) == self.width and self.request.params.early_stopping is True
        if self._can_improve and not full:
            self.finished = sorted([*self.finished, *ended], key=lambda h: -h.score)[: self.width]

    def _look_ahead(self, best_total: float) -> None:
        """Could the best beam still beat the worst result? Once the answer is no, it stays no.

        With early_stopping "never" and a positive penalty the best is assumed to be reached at the greatest
        length, otherwise (a heuristic of transformers) at the present one.
        """
        params = self.request.params
        longest = params.early_stopping == "never" and params.length_penalty > 0
        length = self.request.max_tokens if longest else self.length
        worst = self.finished[-1].score if len(self.finished) == self.width else _UNFILLED
        self._can_improve = self._can_improve and best_total / length**params.length_penalty > worst


def move(tables: BlockTables, sequences: list[Sequence], beams: list[Beam]) -> list[Sequence]:
    """Make the sequences of a search follow its beams; returns them in the order of the beams.

    The first beam that goes on from a sequence stays in it. Others take a sequence that nobody goes on
    from, which gives up its blocks for those of the parent, by reference. Sequences that are left over
    (where there were too few candidates) come last, without blocks.
    """
    heirs: set[int] = set()
    place: list[Sequence | None] = []
    for beam in beams:
        place.append(None if beam.parent in heirs else sequences[beam.parent])
        heirs.add(beam.parent)
    spare = [seq for i, seq in enumerate(sequences) if i not in heirs]
    for seq in spare:
        tables.drop(seq)
    moved: list[Sequence] = []
    for beam, found in zip(beams, place, strict=True):
        seq = found or spare.pop(0)
        if found is None:
            parent = sequences[beam.parent]
            seq.token_ids = list(parent.token_ids)
            tables.share(parent, seq)
        moved.append(seq)
    for beam, seq in zip(beams, moved, strict=True):  # after all sharing: nobody is shared with its new token
        seq.token_ids.append(beam.path.entry.token_id)
    return [*moved, *spare]


def check_limits(request: Request, *, vocab_size: int, max_width: int) -> None:
    """Raise RequestError if this server cannot search that broadly."""
    params = request.params
    name = "n" if params.best_of is None else "best_of"
    if params.num_sequences > max_width:
        raise RequestError(
            f"{name} must be at most {max_width} with use_beam_search on this server", param=name, code="invalid_value"
        )
    needed, limit = num_candidates(request), min(vocab_size, MAX_CANDIDATES)
    if needed > limit:
        raise RequestError(
            f"a beam search of width {params.num_sequences} with {len(request.end_ids)} end tokens needs {needed} "
            f"candidates per step; at most {limit} are available: lower {name} or the number of stop_token_ids",
            param=name,
            code="invalid_value",
        )
