"""A step while it is being planned: its rows, what each asks for, and the tokens that may still be given out."""

from __future__ import annotations

from octavo.beams import num_candidates
from octavo.plan import PlanRow, PoolSpec, SampleSpec
from octavo.request import Request, Sequence


class Draft:
    """`rows` in the order of the plan. `forks`: the samples that begin with what the row of their sibling draws."""

    __slots__ = ("budget", "forks", "rows")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[Sequence, PlanRow] = {}
        self.forks: dict[Sequence, list[Sequence]] = {}

    def add(self, seq: Sequence, end: int) -> None:
        """Compute the tokens of `seq` up to position `end` (exclusive) in this step."""
        self.budget -= end - seq.num_computed
        self.rows[seq] = _row(seq, end)

    def drop(self, seq: Sequence) -> None:
        """Take back what was planned for `seq`, if anything."""
        row = self.rows.pop(seq, None)
        self.forks.pop(seq, None)
        if row is not None:
            self.budget += len(row.token_ids)

    @property
    def num_forks(self) -> int:
        return sum(map(len, self.forks.values()))


def _row(seq: Sequence, end: int) -> PlanRow:
    request = seq.request
    token_ids = seq.token_ids
    sample = sample_spec(seq) if end == len(token_ids) and request.max_tokens > 0 else None
    start = seq.num_computed
    row_ids = token_ids[start:end]
    if request.params.pooling is not None:
        pool = PoolSpec(request.params.pooling, seq.pooled, last=end == seq.num_prompt)
        return PlanRow(row_ids, start, seq.block_ids, pool=pool)
    if not seq.owes_prompt_logprobs or end <= seq.prompt_logprobs_done:
        return PlanRow(row_ids, start, seq.block_ids, sample)
    score_ids = token_ids[start + 1 : min(end + 1, seq.num_prompt)]
    return PlanRow(row_ids, start, seq.block_ids, sample, score_ids, request.params.prompt_logprobs or 0)


def sample_spec(seq: Sequence) -> SampleSpec:
    """How to draw the token after all that `seq` knows."""
    request = seq.request
    banned = () if seq.num_generated >= request.params.min_tokens else _ids_to_ban(request)
    mask = None if seq.constraint is None else seq.constraint.mask()
    wanted = num_candidates(request) if request.params.use_beam_search else 0
    return SampleSpec(
        request.params, request.seed, seq.index, seq.num_known, seq.token_ids, seq.num_prompt, banned, mask, wanted
    )


def _ids_to_ban(request: Request) -> tuple[int, ...]:
    """What may not be drawn before `min_tokens`: everything that would end the sequence.

    Under a grammar a stop token may be the only way on; it is drawn then, and does not stop.
    """
    ids = set(request.params.stop_token_ids) if request.grammar is None else set()
    if not request.params.ignore_eos:
        ids |= request.eos_token_ids
    return tuple(sorted(ids))
