"""Records a model's forward pass as an op program: the Ops protocol without any arithmetic.

Values are symbolic. After the recording, each value's last use is known, so buffers are shared by values
that do not live at the same time; only then is the native program built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.backends.cpu.weights import MatrixRef, NativeWeights, VectorRef

if TYPE_CHECKING:
    from octavo._native import Program


@dataclass(frozen=True, slots=True)
class Value:
    """Columns [offset, offset + width) of a storage."""

    storage: int
    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """One op: `values` are its views, in the order of the native method's view arguments."""

    method: str
    values: tuple[Value, ...]
    emit: Any  # emit(program, *native views)


class Recorder:
    """Implements octavo.ops.contract.Ops. Build with one step's limits, run a forward, then `build`."""

    def __init__(self, weights: NativeWeights, head_dim: int) -> None:
        self.weights = weights
        self.head_dim = head_dim
        self._storages: list[tuple[int, bool]] = []  # (width, rows are outputs)
        self._ops: list[Recorded] = []
        # What `gather` read: the hidden states before the final norm. Ops after it only write rows of outputs,
        # so its buffer keeps them until the next step.
        self.gathered: Value = Value(-1, 0, 0)

    def _new(self, width: int, outputs: bool = False) -> Value:
        self._storages.append((width, outputs))
        return Value(len(self._storages) - 1, 0, width)

    def _outputs(self, x: Value) -> bool:
        return self._storages[x.storage][1]

    def _record(self, method: str, values: tuple[Value, ...], emit: Any) -> None:
        self._ops.append(Recorded(method, values, emit))

    # --- the op set

    def embedding(self, table: MatrixRef) -> Value:
        out = self._new(table.cols)
        self._record("embedding", (out,), lambda p, o: p.embedding(table.index, o))
        return out

    def rms_norm(self, x: Value, weight: VectorRef, eps: float) -> Value:
        out = self._new(x.width, self._outputs(x))
        self._record("rms_norm", (x, out), lambda p, a, o: p.rms_norm(a, weight.index, eps, o))
        return out

    def add_rms_norm(self, x: Value, delta: Value, weight: VectorRef, eps: float) -> tuple[Value, Value]:
        out = self._new(x.width, self._outputs(x))
        self._record("add_rms_norm", (x, delta, out), lambda p, a, b, o: p.add_rms_norm(a, b, weight.index, eps, o))
        return x, out

    def add(self, x: Value, delta: Value) -> Value:
        self._record("add", (x, delta), lambda p, a, b: p.add(a, b))
        return x

    def linear(self, x: Value, weights: Sequence[MatrixRef], bias: VectorRef | None = None) -> Value:
        parts, column = [], 0
        for matrix in weights:
            parts.append((matrix.index, column))
            column += matrix.rows
        out = self._new(column, self._outputs(x))
        index = -1 if bias is None else bias.index
        self._record("linear", (x, out), lambda p, a, o: p.linear(a, parts, index, o))
        return out

    def gated_linear(self, x: Value, gate: MatrixRef, up: MatrixRef, bias: VectorRef | None = None) -> Value:
        out = self._new(gate.rows, self._outputs(x))
        index = -1 if bias is None else bias.index
        self._record("gated_linear", (x, out), lambda p, a, o: p.gated_linear(a, gate.index, up.index, index, o))
        return out

    def split(self, x: Value, widths: Sequence[int]) -> list[Value]:
        assert sum(widths) == x.width
        starts = np.cumsum([0, *widths])
        return [Value(x.storage, x.offset + int(s), width) for s, width in zip(starts, widths, strict=False)]

    def head_norm(self, x: Value, weight: VectorRef, eps: float) -> Value:
        self._record("head_norm", (x,), lambda p, a: p.head_norm(a, weight.size, weight.index, eps))
        return x

    def rope(self, x: Value) -> Value:
        self._record("rope", (x,), lambda p, a: p.rope(a, self.head_dim))
        return x

    def attention(self, q: Value, k: Value, v: Value, *, layer: int, window: int | None) -> Value:
        out = self._new(q.width)
        scale = float(np.float32(1.0 / np.sqrt(self.head_dim)))
        self._record(
            "attention",
            (q, k, v, out),
            lambda p, a, b, c, o: p.attention(a, b, c, layer, window or 0, scale, o),
        )
        return out

    def gather(self, x: Value) -> Value:
        self.gathered = x
        out = self._new(x.width, outputs=True)
        self._record("gather", (x, out), lambda p, a, o: p.gather(a, o))
        return out

    def sample(self, logits: Value) -> None:
        self._record("sample", (logits,), lambda p, a: p.sample(a))

    # --- from recording to program

    def build(self, program: Program) -> dict[int, int]:
        """Allocate buffers and append every op to `program`. Returns storage -> buffer."""
        last_use = {v.storage: i for i, op in enumerate(self._ops) for v in op.values}
        buffers: dict[int, int] = {}
        free: list[tuple[int, bool, int]] = []  # (width, outputs, buffer)
        for i, op in enumerate(self._ops):
            for value in op.values:
                if value.storage not in buffers:
                    buffers[value.storage] = self._take(program, free, self._storages[value.storage])
            views = [[buffers[v.storage], v.offset, v.width] for v in op.values]
            op.emit(program, *views)
            for storage in {v.storage for v in op.values}:
                if last_use[storage] == i:
                    width, outputs = self._storages[storage]
                    free.append((width, outputs, buffers[storage]))
        return buffers

    @staticmethod
    def _take(program: Program, free: list[tuple[int, bool, int]], wanted: tuple[int, bool]) -> int:
        for entry in free:
            if entry[:2] == wanted:
                free.remove(entry)
                return entry[2]
        width, outputs = wanted
        return program.add_buffer(width, outputs)
