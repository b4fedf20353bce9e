"""Runs single ops of the contract through a native program of one op, on any instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo import _native

ISAS: list[str] = _native.available_isas()
# bf16 keeps 8 significant bits, so rounding to nearest errs by at most 2^-8 of the value.
ROUNDING = {isa: 2.0**-8 if isa in ("avx512_bf16", "avx512_vnni_bf16", "amx") else 0.0 for isa in ISAS}
BF16_ATTENTION = ("avx512_vnni_bf16", "amx")  # over a bf16 cache these take queries and weights in bf16
INT8_PRODUCTS = ("avx2", "avx512_vnni", "avx512_vnni_bf16")  # quantised weights meet activations in 8 bits
POSITIONS = 1024


def new_program(isa: str, max_tokens: int, *, threads: int = 2) -> Any:
    program = _native.Program(isa, threads, max_tokens, 1)
    program.add_table("F32", np.zeros(4, dtype=np.uint8), 1, 1)  # a vocabulary of one token
    return program


def put(program: Any, values: np.ndarray) -> list[int]:
    """A new buffer holding `values` in its first rows, surrounded by NaN; returns a view of it."""
    rows, width = values.shape
    index = program.add_buffer(width, False)
    buffer = program.buffer(index)
    buffer[:] = np.nan
    buffer[:rows] = values
    return [index, 0, width]


def execute(program: Any, positions: np.ndarray, row_start: list[int], tables: list[list[int]]) -> None:
    """One step over buffers already filled: no logits, no sampling."""
    table_start = np.cumsum([0, *(len(t) for t in tables)])
    none = np.zeros(0, dtype=np.int32)
    program.execute(
        1,
        np.zeros(len(positions), dtype=np.int32),
        np.asarray(positions, dtype=np.int32),
        np.asarray(row_start, dtype=np.int32),
        table_start.astype(np.int32),
        np.array([b for t in tables for b in t], dtype=np.int32),
        none.reshape(0, 2),
        none,
        np.zeros((0, 6), dtype=np.float32),
        none.reshape(0, 14),
        np.zeros(0, dtype=np.uint64),
        none,
        np.zeros(0, dtype=np.float32),
    )


def _one_row(program: Any, rows: int) -> None:
    execute(program, np.arange(rows), [0, rows], [list(range((rows + 15) // 16))])


def run_op(name: str, isa: str, inputs: dict[str, Any], *, threads: int = 2) -> np.ndarray:
    """The op's output for the contract's inputs, float32 [rows, width]."""
    first = next(a for a in inputs.values() if isinstance(a, np.ndarray))
    rows = first.shape[0]
    program = new_program(isa, rows, threads=threads)
    program.set_rope(np.ones((POSITIONS, 1), dtype=np.float32), np.ones((POSITIONS, 1), dtype=np.float32))
    program.set_kv_shape(1, 1, 2, "float32")
    program.allocate_kv(64)
    if name == "linear":
        weight = np.ascontiguousarray(inputs["weight"])
        return run_linear(isa, "F32", weight.view(np.uint8).reshape(-1), weight.shape, inputs, threads=threads)
    if name == "gated_linear":
        x, out = put(program, inputs["x"]), put(program, np.full((rows, inputs["gate"].shape[0]), np.nan, np.float32))
        matrices = []
        for key in ("gate", "up"):
            weight = np.ascontiguousarray(inputs[key])
            matrices.append(program.add_matrix("F32", weight.view(np.uint8).reshape(-1), *weight.shape))
        program.gated_linear(x, *matrices, program.add_vector(inputs["bias"]), out)
    elif name in ("rms_norm", "add_rms_norm"):
        x, out = put(program, inputs["x"]), put(program, np.full_like(inputs["x"], np.nan))
        if name == "rms_norm":
            program.rms_norm(x, program.add_vector(inputs["weight"]), inputs["eps"], out)
        else:
            weight = program.add_vector(inputs["weight"])
            program.add_rms_norm(x, put(program, inputs["delta"]), weight, inputs["eps"], out)
    elif name == "head_norm":
        out = put(program, inputs["x"])
        program.head_norm(out, inputs["weight"].size, program.add_vector(inputs["weight"]), inputs["eps"])
    else:
        assert name == "rope", name
        padded = [
            np.vstack([inputs[a], np.zeros((POSITIONS - rows, inputs[a].shape[1]), np.float32)]) for a in ("cos", "sin")
        ]
        program.set_rope(*padded)
        out = put(program, inputs["x"])
        program.rope(out, 2 * inputs["cos"].shape[1])
    _one_row(program, rows)
    return np.array(program.buffer(out[0])[:rows])


def run_linear(
    isa: str,
    fmt: str,
    data: np.ndarray,
    shape: tuple[int, ...],
    inputs: dict[str, Any],
    *,
    threads: int = 2,
    after: tuple[np.ndarray, tuple[int, ...]] | None = None,
) -> np.ndarray:
    """x . w^T + bias with the weight given in any format; `after`: another matrix that the program got before."""
    rows = inputs["x"].shape[0]
    program = new_program(isa, rows, threads=threads)
    program.set_rope(np.ones((POSITIONS, 1), dtype=np.float32), np.ones((POSITIONS, 1), dtype=np.float32))
    program.set_kv_shape(1, 1, 2, "float32")
    program.allocate_kv(64)
    if after is not None:
        program.add_matrix(fmt, after[0], *after[1])
    matrix = program.add_matrix(fmt, data, *shape)
    out = put(program, np.full((rows, shape[0]), np.nan, dtype=np.float32))
    program.linear(put(program, inputs["x"]), [(matrix, 0)], program.add_vector(inputs["bias"]), out)
    _one_row(program, rows)
    return np.array(program.buffer(out[0])[:rows])


def run_attention(
    isa: str, inputs: dict[str, Any], *, kv: str, chunk: int | None = None, threads: int = 2, seed: int = 0
) -> np.ndarray:
    """Attention of the contract's inputs: the context is written first, in `chunk`s, then the queries run.

    Blocks are scattered over a pool poisoned with NaN. With `chunk`, the queries too come in chunks.
    """
    q, k, v, positions = inputs["q"], inputs["k"], inputs["v"], inputs["positions"]
    context, head_dim = k.shape[0], inputs["head_dim"]
    step = chunk or context
    program = new_program(isa, max(step, 1), threads=threads)
    program.set_rope(np.ones((POSITIONS, 1), dtype=np.float32), np.ones((POSITIONS, 1), dtype=np.float32))
    program.set_kv_shape(2, k.shape[1] // head_dim, head_dim, kv)
    num_blocks = (context + 15) // 16 + 3
    program.allocate_kv(num_blocks, True)
    table = np.random.default_rng(seed).permutation(num_blocks)[: (context + 15) // 16].tolist()
    views = [put(program, np.zeros((1, a.shape[1]), np.float32)) for a in (q, k, v, q)]
    program.attention(*views[:3], 1, inputs["window"] or 0, float(np.float32(1 / np.sqrt(head_dim))), views[3])
    first = int(positions[0])
    queries = np.vstack([np.zeros((first, q.shape[1]), np.float32), q])
    results = []
    for start in range(0, context, step):
        end = min(start + step, context)
        for view, values in zip(views, (queries, k, v), strict=False):
            program.buffer(view[0])[: end - start] = values[start:end]
        execute(program, np.arange(start, end), [0, end - start], [table])
        results.append(np.array(program.buffer(views[3][0])[: end - start]))
    return np.vstack(results)[first:]
