"""From a StepPlan to the flat int32 arrays that a backend's one call per step takes, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.plan import PlanRow, RowResult, SampleSpec, StepPlan, StepResult, TokenLogprobs

I32 = npt.NDArray[np.int32]

NO_POOLS = (0,) * 8  # starts and lengths of prompt, output, banned and biased ids

ROW_ERRORS = {1: "the model produced NaN or infinite logits", 2: "no token may be drawn: all are excluded"}


@dataclass(slots=True)
class SampleArrays:
    """One entry per row of logits; the columns of `ints` are those of SampleColumn in csrc/bind.cpp."""

    output_tokens: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)  # flat: numpy reads one long list faster than many tuples
    ints: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    bias_values: list[float] = field(default_factory=list)
    mask_rows: list[int] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)

    def add_score(self, token: int, target: int, num_top: int) -> None:
        """Ask for the log-probability of `target` after token number `token` of the step."""
        self.output_tokens.append(token)
        self.floats += (1.0, 1.0, 0.0, 0.0, 0.0, 1.0)
        self.ints += (0, 0, 0, num_top, 0, target, 0, 0, 0, 0, 0, 0, 0, 0)
        self.mask_rows.append(-1)
        self.seeds.append(0)

    def add_sample(self, token: int, spec: SampleSpec) -> None:
        p = spec.params
        self.output_tokens.append(token)
        self.floats += (
            p.temperature,
            p.top_p,
            p.min_p,
            p.presence_penalty,
            p.frequency_penalty,
            p.repetition_penalty,
        )
        num_logprobs = spec.num_logprobs
        self.ints += (
            max(p.top_k, 0),
            spec.sample_index,
            spec.position,
            -1 if num_logprobs is None else num_logprobs,
            1,
            0,
        )
        has_penalties = p.has_penalties
        if has_penalties or spec.banned_ids or p.logit_bias:
            prompt = spec.token_ids[: spec.num_prompt] if has_penalties else []
            output = spec.token_ids[spec.num_prompt :] if has_penalties else []
            self.ints += (*self._pool(prompt), *self._pool(output), *self._pool(spec.banned_ids))
            self.ints += self._pool(p.logit_bias, p.logit_bias.values())
        else:
            self.ints += NO_POOLS
        self.mask_rows.append(-1 if spec.mask is None else len(self.masks))
        if spec.mask is not None:
            self.masks.append(spec.mask)
        self.seeds.append(spec.seed & (2**64 - 1))

    def _pool(self, ids: Any, values: Any = None) -> tuple[int, int]:
        if not ids:
            return 0, 0
        start = len(self.ids)
        self.ids.extend(ids)
        self.bias_values.extend(values if values is not None else [0.0] * len(ids))
        return start, len(self.ids) - start

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return (
            np.array(self.output_tokens, dtype=np.int32),
            np.array(self.floats, dtype=np.float32).reshape(-1, 6),
            np.array(self.ints, dtype=np.int32).reshape(-1, 14),
            np.array(self.seeds, dtype=np.uint64),
            np.array(self.ids, dtype=np.int32),
            np.array(self.bias_values, dtype=np.float32),
            *self._mask_arrays(),
        )

    def _mask_arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Which mask each entry has and uint32 [masks, words]; nothing where no grammar rules."""
        if not self.masks:
            return ()
        words = np.frombuffer(b"".join(self.masks), dtype=np.uint32)
        return np.array(self.mask_rows, dtype=np.int32), words.reshape(len(self.masks), -1)


def flatten(plan: StepPlan) -> tuple[npt.NDArray[Any], ...]:
    """The arguments of the native execute(), without the vocabulary size.

    token_ids, positions [tokens]; row_start, table_start [rows + 1]; block_ids; copies [n, 2]; then SampleArrays.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    row_start, table_start = [0], [0]
    block_ids: list[int] = []
    samples = SampleArrays()
    for row in plan.rows:
        first = len(token_ids)
        token_ids.extend(row.token_ids)
        positions.extend(range(row.start, row.start + len(row.token_ids)))
        block_ids.extend(row.block_ids)
        row_start.append(len(token_ids))
        table_start.append(len(block_ids))
        for i, target in enumerate(row.score_ids):
            samples.add_score(first + i, target, row.num_scores)
        if row.sample is not None:
            for spec in (row.sample, *row.forks):
                samples.add_sample(len(token_ids) - 1, spec)
    as_int32 = [np.array(a, dtype=np.int32) for a in (token_ids, positions, row_start, table_start, block_ids)]
    copies = np.array(plan.copies, dtype=np.int32).reshape(-1, 2)
    return (*as_int32, copies, *samples.arrays())


def unflatten(plan: StepPlan, outputs: tuple[npt.NDArray[Any], ...]) -> StepResult:
    """From the arrays of the native execute() to one RowResult per row of the plan."""
    tokens, status, logprobs, ranks, top_ids, top_logprobs = outputs
    entries = iter(range(len(tokens)))
    token_list, status_list = tokens.tolist(), status.tolist()

    def read(i: int, token_id: int, num_top: int) -> TokenLogprobs:
        top = tuple(zip(top_ids[i, :num_top].tolist(), top_logprobs[i, :num_top].tolist(), strict=True))
        return TokenLogprobs(token_id, float(logprobs[i]), int(ranks[i]), tuple(t for t in top if t[0] >= 0))

    return StepResult(tuple(_read_row(row, entries, token_list, status_list, read) for row in plan.rows))


def _read_row(row: PlanRow, entries: Iterator[int], tokens: list[int], status: list[int], read: Any) -> RowResult:
    if row.sample is not None and not row.score_ids and not row.forks:  # nearly always
        i = next(entries)
        if fault := ROW_ERRORS.get(status[i]):
            return RowResult(error=fault)
        wanted = row.sample.num_logprobs
        return RowResult(tokens[i], None if wanted is None else read(i, tokens[i], wanted))
    scores: list[TokenLogprobs] = []
    error: str | None = None
    for target in row.score_ids:
        i = next(entries)
        error = error or ROW_ERRORS.get(status[i])
        scores.append(read(i, target, row.num_scores))
    if row.sample is None:
        return RowResult(scores=tuple(scores), error=error)
    drawn = []
    for spec in (row.sample, *row.forks):
        i = next(entries)
        if fault := error or ROW_ERRORS.get(status[i]):
            drawn.append(RowResult(error=fault))
            continue
        wanted = spec.num_logprobs
        drawn.append(RowResult(tokens[i], None if wanted is None else read(i, tokens[i], wanted)))
    first, *forks = drawn
    return RowResult(first.token_id, first.logprobs, () if first.error else tuple(scores), first.error, tuple(forks))
