"""The ops of a model one site at a time: native programs that hold only, say, the down projections of all layers.

A site is an op of the forward pass as it comes again in every layer, with the same shape. Its program runs it for all
layers with the model's own weights, so that they come from memory as they do in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo import _native
from octavo.backends.cpu.backend import rope_table
from octavo.backends.cpu.recorder import Recorder, Value
from octavo.backends.cpu.weights import MatrixRef, NativeWeights, VectorRef
from octavo.backends.inputs import flatten
from octavo.models import forward_of
from octavo.models.loading import LoadedModel
from octavo.models.spec import ModelSpec
from octavo.plan import PlanRow, StepPlan
from octavo.weights.files import TensorView

BLOCK_SIZE = 16
PRODUCTS = ("linear", "gated_linear")
TIMED = (*PRODUCTS, "attention", "add_rms_norm", "rms_norm", "head_norm", "rope", "sample")


@dataclass(frozen=True, slots=True)
class Site:
    """`label` and `shape` are for people; `ops` are the indices of its ops in the recording."""

    method: str
    label: str
    shape: str
    weight_format: str
    ops: tuple[int, ...]
    widths: tuple[int, ...]  # of the op's views
    matrices: frozenset[str]

    @property
    def num_ops(self) -> int:
        return len(self.ops)


@dataclass(frozen=True, slots=True)
class _Named(MatrixRef):
    name: str = ""
    weight_format: str = ""


class _Shapes:
    """Implements octavo.ops.contract.Weights without loading: every tensor is its name and shape."""

    def __init__(self, tensors: Mapping[str, TensorView]) -> None:
        self._tensors = tensors

    def table(self, name: str) -> MatrixRef:
        return self.matrix(name)

    def matrix(self, name: str) -> MatrixRef:
        tensor = self._tensors[name]
        rows, cols = tensor.shape
        return _Named(0, rows, cols, name, tensor.format)

    def vector(self, *names: str) -> VectorRef:
        return VectorRef(0, sum(int(np.prod(self._tensors[name].shape)) for name in names))


class _Some(_Shapes):
    """The same, but loads the matrices named in `wanted`, and all vectors."""

    def __init__(self, tensors: Mapping[str, TensorView], native: NativeWeights, wanted: frozenset[str]) -> None:
        super().__init__(tensors)
        self._native = native
        self._wanted = wanted

    def matrix(self, name: str) -> MatrixRef:
        return self._native.matrix(name) if name in self._wanted else super().matrix(name)

    def table(self, name: str) -> MatrixRef:
        return super().matrix(name)

    def vector(self, *names: str) -> VectorRef:
        return self._native.vector(*names)


class _SiteRecorder(Recorder):
    """Notes which matrices each linear op reads, and can build a program of some of the ops only."""

    def __init__(self, weights: Any, head_dim: int) -> None:
        super().__init__(weights, head_dim)
        self._parts: dict[int, list[_Named]] = {}

    def linear(self, x: Value, weights: Sequence[MatrixRef], bias: VectorRef | None = None) -> Value:
        self._parts[len(self._ops)] = [w for w in weights if isinstance(w, _Named)]
        return super().linear(x, weights, bias)

    def gated_linear(self, x: Value, gate: MatrixRef, up: MatrixRef, bias: VectorRef | None = None) -> Value:
        self._parts[len(self._ops)] = [w for w in (gate, up) if isinstance(w, _Named)]
        return super().gated_linear(x, gate, up, bias)

    def sites(self) -> list[Site]:
        """In the order of the forward pass."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for i, op in enumerate(self._ops):
            if op.method in TIMED:
                parts = self._parts.get(i, [])
                key = (op.method, tuple(v.width for v in op.values), _stems(parts), _formats(parts))
                found.setdefault(key, []).append(i)
        return [
            Site(
                method,
                stems or method,
                _shape(method, widths),
                formats,
                tuple(ops),
                widths,
                frozenset(part.name for i in ops for part in self._parts.get(i, [])),
            )
            for (method, widths, stems, formats), ops in found.items()
        ]

    def build_some(self, program: Any, indices: Sequence[int]) -> list[int]:
        """Appends these ops to `program`; returns their buffers.

        All of them share the same buffers, view by view, so that no op reads what another one wrote: values neither
        overflow nor become denormal, however often they run. Ops on rows of logits need the gather before them.
        """
        buffers: list[int] = []
        ops = [self._ops[i] for i in indices]
        if any(self._storages[v.storage][1] for v in ops[0].values):
            gather = next(op for op in self._ops if op.method == "gather")
            views = [[program.add_buffer(v.width, self._storages[v.storage][1]), 0, v.width] for v in gather.values]
            gather.emit(program, *views)
        for op in ops:
            order: dict[int, int] = {}
            for value in op.values:
                if order.setdefault(value.storage, len(order)) == len(buffers):
                    buffers.append(program.add_buffer(*self._storages[value.storage]))
            op.emit(program, *([buffers[order[v.storage]], v.offset, v.width] for v in op.values))
        return buffers


def _stems(parts: list[_Named]) -> str:
    """q_proj, k_proj and v_proj of any layer: "q+k+v"."""
    stems = [part.name.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj") for part in parts]
    return "+".join("head" if stem in ("embed_tokens", "lm_head") else stem for stem in stems)


def _formats(parts: list[_Named]) -> str:
    return "+".join(sorted({part.weight_format for part in parts}))


def _shape(method: str, widths: tuple[int, ...]) -> str:
    if method in PRODUCTS:
        return f"{widths[0]} -> {widths[-1]}"
    if method == "attention":
        return f"q {widths[0]}, kv {widths[1]}"
    return str(widths[0])


def sites_of(model: LoadedModel) -> list[Site]:
    """All sites of a model's forward pass, sampling included."""
    return _record(model, _Shapes(model.tensors)).sites()


def _record(model: LoadedModel, weights: Any) -> _SiteRecorder:
    recorder = _SiteRecorder(weights, model.spec.head_dim)
    recorder.sample(forward_of(model.spec.architecture)(recorder, weights, model.spec))
    return recorder


@dataclass
class SiteProgram:
    """A native program of one site. `run` executes a step and returns the seconds that the site's ops took."""

    site: Site
    spec: ModelSpec
    program: Any
    max_tokens: int
    num_blocks: int
    _filled: bool = field(default=False, init=False)

    @property
    def weight_bytes(self) -> int:
        """Of one op, as the kernels read them."""
        return int(self.program.weight_bytes) // self.site.num_ops if self.site.method in PRODUCTS else 0

    def run(self, plan: StepPlan) -> float:
        before = self.program.op_seconds[self.site.method]
        self.program.execute(self.spec.vocab_size, *flatten(plan))
        return float(self.program.op_seconds[self.site.method] - before)

    def fill_kv(self) -> None:
        """Writes all blocks once, each as a sequence of its own: memory never written would not be read either."""
        if self.site.method != "attention" or self._filled:
            return
        each = max(1, self.max_tokens // BLOCK_SIZE)
        for first in range(0, self.num_blocks, each):
            blocks = range(first, min(first + each, self.num_blocks))
            self.run(StepPlan(tuple(PlanRow([0] * BLOCK_SIZE, 0, [block]) for block in blocks)))
        self._filled = True


def site_program(
    model: LoadedModel, site: Site, *, isa: str, threads: int, max_tokens: int, num_blocks: int, max_len: int
) -> SiteProgram:
    """The program of one site, its activations filled with small random numbers from a fixed seed."""
    spec = model.spec
    max_tokens = max(max_tokens, BLOCK_SIZE)
    program = _native.Program(isa, threads, max_tokens, max_tokens)
    program.set_rope(*rope_table(spec, None, max_len))
    program.set_kv_shape(spec.num_layers, spec.num_kv_heads, spec.head_dim, "bfloat16")
    program.allocate_kv(num_blocks)
    # A program needs a vocabulary to check token ids against; nothing reads the table.
    embedding = model.tensors["model.embed_tokens.weight"]
    program.add_table(embedding.format, embedding.data, *embedding.shape)
    weights = _Some(model.tensors, NativeWeights(program, model.tensors), site.matrices)
    buffers = _record(model, weights).build_some(program, site.ops)
    rng = np.random.default_rng(0)
    for buffer in buffers:
        view = program.buffer(buffer)
        view[:] = rng.standard_normal(view.shape, dtype=np.float32) * np.float32(0.1)
    return SiteProgram(site, spec, program, max_tokens, num_blocks)
