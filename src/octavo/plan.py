"""The whole contract between scheduler and backend: what one step computes, and what came of it.

Only ints and sampling parameters cross this line, so a reader can stop here and understand the
scheduler without any backend, and a backend without the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.request import Pooling, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to draw the next token of one sequence.

    The draw is a pure function of (seed, sample_index, position) and of the row of logits, so it
    does not depend on the batch (law 1). `position` is that of the token being drawn.
    `token_ids` are all known tokens, of which the first `num_prompt` are the prompt: the penalties
    need them; do not modify. `banned_ids` may not be drawn (EOS and stop tokens before `min_tokens`).
    `mask`, where a grammar rules: one bit per token, lowest first, in 32-bit words; 0 may not be drawn.
    `num_candidates`, if not 0, asks for the logprobs of that many tokens, whatever `params` say: a beam
    search chooses among them itself.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    token_ids: list[int]
    num_prompt: int
    banned_ids: tuple[int, ...] = ()
    mask: bytes | None = None
    num_candidates: int = 0

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens come back beside the drawn one; None: no logprobs."""
        return self.num_candidates or self.params.num_logprobs


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """An embedding in the making. `state` is the `pooled` of the sequence's row before this one, b"" at first.

    `last`: the row ends the prompt. What is made must not depend on how rows cut the prompt (law 1).
    """

    pooling: Pooling
    state: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence's share of a step.

    The backend writes the KV of `token_ids` (at least one) at positions start, start+1, ... into the
    slots that `block_ids` gives: slot(p) = block_ids[p // block_size] * block_size + p % block_size.
    KV of positions before `start` is already there. `sample` is set iff the last token of the row is
    the last known token of its sequence and a token is wanted. `score_ids[i]`, where present, asks for
    the log-probability of that token as the successor of token_ids[i] (prompt logprobs), with the
    `num_scores` most probable alternatives. `forks` are further draws from the logits that `sample` draws
    from, for sequences that share this row's tokens so far: the prompt of n samples is computed once.
    """

    token_ids: list[int]
    start: int
    block_ids: list[int]
    sample: SampleSpec | None = None
    score_ids: list[int] = field(default_factory=list)
    num_scores: int = 0
    forks: tuple[SampleSpec, ...] = ()
    pool: PoolSpec | None = None

    def __post_init__(self) -> None:
        assert self.token_ids and self.start >= 0
        assert len(self.score_ids) <= len(self.token_ids)
        assert not self.forks or self.sample is not None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its rows, decodes first.

    `copies` are (source, target) block ids: whole blocks, all layers, copied one after the other in this
    order before any row writes. So the source of one copy may be the target of a later one.
    """

    rows: tuple[PlanRow, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the raw distribution (before penalties, temperature).

    `rank` is 1 for the most probable token. `top` holds the most probable tokens, best first, as many
    as were asked for; the token itself need not be among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """What came of one PlanRow: the drawn token if one was asked for, or the error of that row alone.

    `logprobs` is set iff `sample.num_logprobs` is not None; `scores` has one entry per `score_ids`,
    `forks` one result per entry of the row's `forks`. `pooled` is set iff the row has a `pool`: where that is
    the `last`, the embedding as float32 (little-endian), else a state for the next row.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    scores: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    forks: tuple[RowResult, ...] = ()
    pooled: bytes | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's rows."""

    rows: tuple[RowResult, ...]
