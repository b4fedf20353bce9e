"""A model's parameters inside a native program: packed matrices, kept embedding tables, float32 vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.weights.files import TensorView
from octavo.weights.formats import FORMATS


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
        self, program: Any, tensors: Mapping[str, TensorView], advance: Callable[[int], None] = lambda _: None
    ) -> None:
        self._program = program
        self._tensors = tensors
        self._advance = advance
        self._loaded: dict[tuple[str, ...], Any] = {}

    def table(self, name: str) -> MatrixRef:
        return self._load(("table", name), lambda: self._add(self._program.add_table, name))

    def matrix(self, name: str) -> MatrixRef:
        return self._load(("matrix", name), lambda: self._add(self._program.add_matrix, name))

    def vector(self, *names: str) -> VectorRef:
        return self._load(("vector", *names), lambda: self._add_vector(names))

    def _load(self, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
        if key not in self._loaded:
            self._loaded[key] = make()
        return self._loaded[key]

    def _add(self, add: Callable[..., int], name: str) -> MatrixRef:
        tensor = self._tensors[name]
        rows, cols = tensor.shape
        index = add(tensor.format, tensor.data, rows, cols)
        self._advance(tensor.data.nbytes)
        return MatrixRef(index, rows, cols)

    def _add_vector(self, names: tuple[str, ...]) -> VectorRef:
        values = np.concatenate([floats(self._tensors[name]) for name in names])
        return VectorRef(self._program.add_vector(values), values.size)


def floats(tensor: TensorView) -> npt.NDArray[np.float32]:
    """All values of a tensor, flat."""
    return np.ascontiguousarray(FORMATS[tensor.format].unpack(tensor.data), dtype=np.float32).reshape(-1)
