"""The op set: each op once, with its reference, its inputs for tests, its tolerance and its cost.

Models are written against the `Ops` protocol; backends implement it. `OPS` holds, for every op that
computes, a numpy reference in float64 and what a test needs to hold an implementation to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
M_contra = TypeVar("M_contra", contravariant=True)
V_contra = TypeVar("V_contra", contravariant=True)
M_co = TypeVar("M_co", covariant=True)
V_co = TypeVar("V_co", covariant=True)

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


class Ops(Protocol[T, M_contra, V_contra]):
    """What a model may call. T: activations [rows, width], M_contra: a matrix, V_contra: a vector.

    Rows are tokens of the step, up to `gather`, which keeps the rows whose logits are wanted.
    """

    def embedding(self, table: M_contra) -> T:
        """Rows of the table at the step's token ids."""
        ...

    def rms_norm(self, x: T, weight: V_contra, eps: float) -> T:
        """x / sqrt(mean(x^2) + eps) * weight, row by row."""
        ...

    def add_rms_norm(self, x: T, delta: T, weight: V_contra, eps: float) -> tuple[T, T]:
        """(x + delta, rms_norm(x + delta)); consumes x."""
        ...

    def add(self, x: T, delta: T) -> T:
        """x + delta; consumes x."""
        ...

    def linear(self, x: T, weights: Sequence[M_contra], bias: V_contra | None = None) -> T:
        """x . w^T for each w of `weights` ([out, in]), side by side, plus bias."""
        ...

    def gated_linear(self, x: T, gate: M_contra, up: M_contra, bias: V_contra | None = None) -> T:
        """silu(x . gate^T) * (x . up^T); `bias` holds gate's, then up's."""
        ...

    def split(self, x: T, widths: Sequence[int]) -> list[T]:
        """Column ranges of x, without a copy."""
        ...

    def head_norm(self, x: T, weight: V_contra, eps: float) -> T:
        """rms_norm over each head (len(weight) columns) on its own; consumes x."""
        ...

    def rope(self, x: T) -> T:
        """Rotate each head by its token's position, halves paired (i, i + head_dim / 2); consumes x."""
        ...

    def attention(self, q: T, k: T, v: T, *, layer: int, window: int | None) -> T:
        """Write k and v to the KV cache, then causal attention of q over the sequence so far.

        A query sees itself and the window - 1 keys before it; None: all keys. Scale: 1 / sqrt(head_dim).
        """
        ...

    def gather(self, x: T) -> T:
        """The rows of x whose next-token logits are wanted."""
        ...


class Weights(Protocol[M_co, V_co]):
    """A model's parameters by their Hugging Face names."""

    def table(self, name: str) -> M_co: ...

    def matrix(self, name: str) -> M_co: ...

    def vector(self, *names: str) -> V_co:
        """One vector, or several end to end."""
        ...


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one call: floating-point operations, and bytes that must move."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the contract.

    `example(rng, rows, width)` makes keyword inputs; `reference(**inputs)` is the right result in
    float64; `tolerance(inputs, rounding)` bounds |result - reference| element by element, derived from the
    arithmetic, where `rounding` is the relative rounding error of activations in matrix products (2^-8 for
    bf16, 0 for float32); `cost(inputs)` counts the work.
    """

    name: str
    reference: Callable[..., F64]
    example: Callable[[np.random.Generator, int, int], dict[str, Any]]
    tolerance: Callable[[dict[str, Any], float], F64]
    cost: Callable[[dict[str, Any]], Cost]


EPS32 = 2.0**-24  # rounding of one float32 operation
EXP_ERROR = 2.0**-21  # relative error allowed to a float32 exponential


def _normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, dtype=np.float32)


# --- norms and elementwise ops ---------------------------------------------------------------------------------------


def rms_norm(x: F32, weight: F32, eps: float) -> F64:
    wide = x.astype(np.float64)
    out: F64 = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight.astype(np.float64)
    return out


def add_rms_norm(x: F32, delta: F32, weight: F32, eps: float) -> F64:
    return rms_norm(x + delta, weight, eps)  # the sum itself is rounded to float32


def head_norm(x: F32, weight: F32, eps: float) -> F64:
    heads = x.reshape(x.shape[0], -1, weight.size)
    return rms_norm(heads, weight, eps).reshape(x.shape)


def rope(x: F32, cos: F32, sin: F32) -> F64:
    """cos, sin: [rows, head_dim / 2]."""
    half = cos.shape[1]
    heads = x.astype(np.float64).reshape(x.shape[0], -1, 2, half)
    first, second = heads[:, :, 0], heads[:, :, 1]
    c, s = cos[:, None, :].astype(np.float64), sin[:, None, :].astype(np.float64)
    out: F64 = np.stack([first * c - second * s, second * c + first * s], axis=2).reshape(x.shape)
    return out


def linear(x: F32, weight: F32, bias: F32) -> F64:
    return x.astype(np.float64) @ weight.astype(np.float64).T + bias.astype(np.float64)


def gated_linear(x: F32, gate: F32, up: F32, bias: F32) -> F64:
    halves = linear(x, np.concatenate([gate, up]), bias)
    first, second = halves[:, : gate.shape[0]], halves[:, gate.shape[0] :]
    out: F64 = first / (1.0 + np.exp(-first)) * second
    return out


def attention(q: F32, k: F32, v: F32, positions: npt.NDArray[np.int32], window: int | None, head_dim: int) -> F64:
    """One sequence. q: [tokens, heads * head_dim] at `positions`; k, v: [context, kv_heads * head_dim] from 0 on."""
    queries = q.astype(np.float64).reshape(q.shape[0], -1, head_dim)
    keys, values = (a.astype(np.float64).reshape(a.shape[0], -1, head_dim) for a in (k, v))
    group = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(a, group, axis=1) for a in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(head_dim)
    at = np.arange(k.shape[0])[None, :]
    visible = at <= positions[:, None]
    if window is not None:
        visible &= at > positions[:, None] - window
    scores = np.where(visible[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: F64 = np.einsum("hqk,khd->qhd", weights, values).reshape(q.shape)
    return out


# --- tolerances ------------------------------------------------------------------------------------------------------


def _norm_tolerance(inputs: dict[str, Any], _rounding: float) -> F64:
    # The sum of n squares errs by at most about n roundings, half of which survive the square root.
    x, weight = inputs["x"], inputs["weight"]
    reference = head_norm(x + inputs.get("delta", np.float32(0)), weight, inputs["eps"])
    bound: F64 = np.abs(reference) * EPS32 * (weight.size + 8) + 1e-30
    return bound


def _rope_tolerance(inputs: dict[str, Any], _rounding: float) -> F64:
    x, half = np.abs(inputs["x"]).astype(np.float64), inputs["cos"].shape[1]
    pairs = x.reshape(x.shape[0], -1, 2, half).sum(axis=2, keepdims=True)
    bound: F64 = np.repeat(pairs, 2, axis=2).reshape(x.shape) * 3 * EPS32
    return bound


def _linear_tolerance(inputs: dict[str, Any], rounding: float) -> F64:
    # Each product errs by the rounding of x; each of k additions by one rounding of a partial sum, which is
    # at most the sum of magnitudes.
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    magnitude = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T
    bound: F64 = magnitude * (rounding + EPS32 * (x.shape[1] + 4)) + np.abs(bias) * EPS32 + 1e-30
    return bound


def _gated_tolerance(inputs: dict[str, Any], rounding: float) -> F64:
    # silu has a slope of at most 1.1 and |silu(g)| <= |g|: errors of both halves pass through the product.
    x, weight = inputs["x"], np.concatenate([inputs["gate"], inputs["up"]])
    both = {"x": x, "weight": weight, "bias": inputs["bias"]}
    error, value, n = _linear_tolerance(both, rounding), np.abs(linear(**both)), inputs["gate"].shape[0]
    bound: F64 = (1.1 * error[:, :n]) * (value[:, n:] + error[:, n:]) + (value[:, :n] + error[:, :n]) * error[:, n:]
    return bound + value[:, :n] * value[:, n:] * (EXP_ERROR + 8 * EPS32)


def _attention_tolerance(inputs: dict[str, Any], rounding: float) -> F64:
    # A score errs by at most head_dim float32 roundings of sum |q||k|, and by the rounding of q; that moves each
    # weight by that factor twice (numerator and denominator). The rounding of the weights themselves, and the sums
    # over the context, one rounding per token, come on top.
    q, k, v, head_dim = inputs["q"], inputs["k"], inputs["v"], inputs["head_dim"]
    length = (
        np.linalg.norm(q.reshape(-1, head_dim), axis=1).max() * np.linalg.norm(k.reshape(-1, head_dim), axis=1).max()
    )
    score_error = float(length) / np.sqrt(head_dim) * (head_dim * EPS32 + rounding)
    relative = 2 * score_error + 2 * rounding + 2 * EXP_ERROR + 4 * EPS32 * k.shape[0]
    return np.full(q.shape, float(np.abs(v).max()) * relative, dtype=np.float64)


# --- examples --------------------------------------------------------------------------------------------------------


def _norm_example(rng: np.random.Generator, rows: int, width: int) -> dict[str, Any]:
    return {"x": _normal(rng, rows, width) * 3, "weight": _normal(rng, width), "eps": 1e-5}


def _add_norm_example(rng: np.random.Generator, rows: int, width: int) -> dict[str, Any]:
    return {**_norm_example(rng, rows, width), "delta": _normal(rng, rows, width)}


def _head_norm_example(rng: np.random.Generator, rows: int, width: int) -> dict[str, Any]:
    head_dim = next(d for d in (64, 24, 16, 5, 1) if width % d == 0)
    return {"x": _normal(rng, rows, width), "weight": _normal(rng, head_dim), "eps": 1e-6}


def _rope_example(rng: np.random.Generator, rows: int, width: int) -> dict[str, Any]:
    head_dim = next(d for d in (64, 24, 16, 10, 2) if width % d == 0)
    angle = rng.uniform(0, 100, (rows, head_dim // 2))
    return {
        "x": _normal(rng, rows, width),
        "cos": np.cos(angle).astype(np.float32),
        "sin": np.sin(angle).astype(np.float32),
    }


def _linear_example(rng: np.random.Generator, rows: int, width: int) -> dict[str, Any]:
    num_out = int(rng.integers(1, 70))
    return {"x": _normal(rng, rows, width), "weight": _normal(rng, num_out, width), "bias": _normal(rng, num_out)}


def _gated_example(rng: np.random.Generator, rows: int, width: int) -> dict[str, Any]:
    num_out = int(rng.integers(1, 150))
    return {
        "x": _normal(rng, rows, width),
        "gate": _normal(rng, num_out, width) / np.float32(np.sqrt(width)),
        "up": _normal(rng, num_out, width),
        "bias": _normal(rng, 2 * num_out),
    }


def _attention_example(rng: np.random.Generator, rows: int, width: int) -> dict[str, Any]:
    """`rows` query tokens at the end of a context; `width` picks head_dim and the grouping."""
    head_dim = 2 * max(1, width // 8)
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    context = rows + int(rng.integers(0, 150))
    window = None if rng.random() < 0.5 else int(rng.integers(1, context + 8))
    return {
        "q": _normal(rng, rows, kv_heads * group * head_dim),
        "k": _normal(rng, context, kv_heads * head_dim),
        "v": _normal(rng, context, kv_heads * head_dim),
        "positions": np.arange(context - rows, context, dtype=np.int32),
        "window": window,
        "head_dim": head_dim,
    }


# --- costs -----------------------------------------------------------------------------------------------------------


def _elementwise_cost(flops_per_value: float) -> Callable[[dict[str, Any]], Cost]:
    def cost(inputs: dict[str, Any]) -> Cost:
        arrays = [a for a in inputs.values() if isinstance(a, np.ndarray) and a.ndim == 2]
        return Cost(flops_per_value * arrays[0].size, 4.0 * (sum(a.size for a in arrays) + arrays[0].size))

    return cost


def _linear_cost(inputs: dict[str, Any]) -> Cost:
    (rows, k), n = inputs["x"].shape, inputs["weight"].shape[0]
    return Cost(2.0 * rows * k * n, 4.0 * (rows * k + n * k + rows * n))


def _gated_cost(inputs: dict[str, Any]) -> Cost:
    (rows, k), n = inputs["x"].shape, inputs["gate"].shape[0]
    return Cost(4.0 * rows * k * n + 5.0 * rows * n, 4.0 * (rows * k + 2 * n * k + rows * n))


def _attention_cost(inputs: dict[str, Any]) -> Cost:
    q, k = inputs["q"], inputs["k"]
    window = inputs["window"] or k.shape[0]
    seen = float(np.minimum(inputs["positions"].astype(np.int64) + 1, window).sum())
    return Cost(4.0 * q.shape[1] * seen, 4.0 * (2 * q.size + 2 * k.size))


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("rms_norm", rms_norm, _norm_example, _norm_tolerance, _elementwise_cost(4)),
        Op("add_rms_norm", add_rms_norm, _add_norm_example, _norm_tolerance, _elementwise_cost(5)),
        Op("head_norm", head_norm, _head_norm_example, _norm_tolerance, _elementwise_cost(4)),
        Op("rope", rope, _rope_example, _rope_tolerance, _elementwise_cost(3)),
        Op("linear", linear, _linear_example, _linear_tolerance, _linear_cost),
        Op("gated_linear", gated_linear, _gated_example, _gated_tolerance, _gated_cost),
        Op("attention", attention, _attention_example, _attention_tolerance, _attention_cost),
    )
}
