"""Embeddings: the final norm over a step's hidden states, and their last one or mean, as plan.PoolSpec asks."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from octavo.plan import PoolSpec, RowResult, StepPlan, StepResult
from octavo.request import Pooling

F32 = npt.NDArray[np.float32]


class Pooler:
    """`hidden` is the program's buffer of hidden states before the final norm, [tokens of a step, hidden].

    The mean adds token after token in float64, each after the one before it, so that it is the same to the
    bit however steps cut the prompt. Sums travel between steps as bytes: float64 [hidden], then the count.
    """

    def __init__(self, hidden: F32, weight: F32, eps: float) -> None:
        self._hidden = hidden
        self._weight = weight.astype(np.float32)
        self._eps = np.float32(eps)

    def pooled(self, plan: StepPlan, result: StepResult) -> StepResult:
        """`result` with the `pooled` of the rows that want it; a row with NaN or infinity becomes an error."""
        rows = []
        first = 0
        for row, out in zip(plan.rows, result.rows, strict=True):
            end = first + len(row.token_ids)
            rows.append(out if row.pool is None or out.error else self._row(row.pool, self._hidden[first:end]))
            first = end
        return dataclasses.replace(result, rows=tuple(rows))

    def _row(self, pool: PoolSpec, hidden: F32) -> RowResult:
        if pool.pooling is Pooling.LAST:
            if not pool.last:
                return RowResult(pooled=b"")
            embedding = self._norm(hidden[-1])
        else:
            width = hidden.shape[1]
            sums = np.frombuffer(pool.state, np.float64).copy() if pool.state else np.zeros(width + 1)
            for token in hidden:
                sums[:width] += self._norm(token)
                sums[width] += 1
            if not pool.last:
                return RowResult(pooled=sums.tobytes())
            embedding = (sums[:width] / sums[width]).astype(np.float32)
        if not np.isfinite(embedding).all():
            return RowResult(error="the model produced NaN or infinite hidden states")
        return RowResult(pooled=embedding.astype("<f4").tobytes())

    def _norm(self, x: F32) -> F32:
        """RMSNorm of one row; one row at a time, so that the order of its sum depends on nothing else."""
        scale = np.float32(1) / np.sqrt(np.mean(x * x, dtype=np.float32) + self._eps)
        return np.asarray(x * scale * self._weight, dtype=np.float32)
