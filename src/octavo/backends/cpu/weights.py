"""A model's parameters inside a native program: packed matrices, kept embedding tables, float32 vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.weights.files import TensorView
from octavo.weights.formats import FORMATS

if TYPE_CHECKING:
    from octavo._native import Program


@dataclass(frozen=True, slots=True)
class MatrixRef:
    """A matrix [rows, cols] or embedding table in the program."""

    index: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class VectorRef:
    index: int
    size: int


class NativeWeights:
    """Implements octavo.ops.contract.Weights over one native program; loads each tensor when first asked for.

    `advance(num_bytes)` is called as tensors are packed.
    """

    def __init__(
        self, program: Program, tensors: Mapping[str, TensorView], advance: Callable[[int], None] = lambda _: None
    ) -> None:
        self._program = program
        self._tensors = tensors
        self._advance = advance
        self._matrices: dict[tuple[str, str], MatrixRef] = {}
        self._vectors: dict[tuple[str, ...], VectorRef] = {}

    def table(self, name: str) -> MatrixRef:
        return self._matrix("table", name, self._program.add_table)

    def matrix(self, name: str) -> MatrixRef:
        return self._matrix("matrix", name, self._program.add_matrix)

    def vector(self, *names: str) -> VectorRef:
        if names not in self._vectors:
            values = np.concatenate([floats(self._tensors[name]) for name in names])
            self._vectors[names] = VectorRef(self._program.add_vector(values), values.size)
        return self._vectors[names]

    def _matrix(self, kind: str, name: str, add: Callable[..., int]) -> MatrixRef:
        if (kind, name) not in self._matrices:
            tensor = self._tensors[name]
            rows, cols = tensor.shape
            self._matrices[kind, name] = MatrixRef(add(tensor.format, tensor.data, rows, cols), rows, cols)
            self._advance(tensor.data.nbytes)
        return self._matrices[kind, name]


def floats(tensor: TensorView) -> npt.NDArray[np.float32]:
    """All values of a tensor, flat."""
    return np.ascontiguousarray(FORMATS[tensor.format].unpack(tensor.data), dtype=np.float32).reshape(-1)
