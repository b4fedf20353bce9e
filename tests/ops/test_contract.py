"""Every op of the contract against its reference, on every instruction set of this machine, ragged sizes."""

from __future__ import annotations

import numpy as np
import pytest
from ops.native_ops import ISAS, ROUNDING, run_attention, run_linear, run_op

from octavo.ops.contract import OPS
from octavo.weights.formats import FORMATS

ROWS = (1, 2, 3, 5, 7, 13, 20, 33)
WIDTHS = (1, 2, 3, 15, 16, 17, 30, 48, 64, 100, 192, 577)
EVEN_WIDTHS = tuple(w for w in WIDTHS if w % 2 == 0)


def assert_close(result: np.ndarray, reference: np.ndarray, tolerance: np.ndarray) -> None:
    error = np.abs(result.astype(np.float64) - reference)
    assert np.isfinite(result).all()
    worst = np.unravel_index(np.argmax(error - tolerance), error.shape)
    assert (error <= tolerance).all(), f"at {worst}: error {error[worst]:.3g}, allowed {tolerance[worst]:.3g}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [n for n in OPS if n != "attention"])
def test_op_matches_reference(name: str, isa: str) -> None:
    op = OPS[name]
    rng = np.random.default_rng(1)
    for rows in ROWS:
        for width in EVEN_WIDTHS if name == "rope" else WIDTHS:
            inputs = op.example(rng, rows, width)
            # A float32 matrix is multiplied in float32 on every instruction set.
            assert_close(run_op(name, isa, inputs), op.reference(**inputs), op.tolerance(inputs, 0.0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("wide", [True, False], ids=["f32", "bf16"])
def test_attention_matches_reference(isa: str, wide: bool) -> None:
    op = OPS["attention"]
    rng = np.random.default_rng(2)
    for rows in ROWS:
        for width in (8, 24, 64, 128, 200, 256):
            inputs = op.example(rng, rows, width)
            if not wide:  # values that bf16 holds exactly, so that the same tolerance applies
                for key in ("k", "v"):
                    inputs[key] = (inputs[key].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            rounding = ROUNDING[isa] if isa == "amx" and not wide else 0.0  # tiles take q and weights in bf16
            assert_close(run_attention(isa, inputs, wide=wide), op.reference(**inputs), op.tolerance(inputs, rounding))


def random_matrix(rng: np.random.Generator, fmt: str, rows: int, cols: int) -> np.ndarray:
    """Random bytes of a format, with every scale a sane number."""
    if fmt == "F32":
        return rng.standard_normal((rows, cols), dtype=np.float32).view(np.uint8).reshape(-1)
    if fmt in ("F16", "BF16"):
        values = rng.standard_normal((rows, cols), dtype=np.float32)
        halves = (
            values.astype(np.float16).view(np.uint16)
            if fmt == "F16"
            else (values.view(np.uint32) >> 16).astype(np.uint16)
        )
        return halves.view(np.uint8).reshape(-1)
    info = FORMATS[fmt]
    blocks = rng.integers(0, 256, (rows * cols // info.block_len, info.block_bytes), dtype=np.uint8)
    scale_offsets = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q6_K": (208,),
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
    }
    for offset in scale_offsets.get(fmt, (0,)):
        scales = rng.uniform(-0.1, 0.1, blocks.shape[0]).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


# Largest |scale q| + |minimum| of random_matrix in the formats with minimums: 0.1 x (group scale x q + group minimum).
LARGEST_TERM = {"Q4_1": 1.6, "Q5_1": 3.2, "Q2_K": 6.0, "Q4_K": 100.8, "Q5_K": 201.6}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_linear_in_every_format(fmt: str, isa: str) -> None:
    op = OPS["linear"]
    rng = np.random.default_rng(3)
    block = FORMATS[fmt].block_len
    for rows in ROWS:
        for num_out, cols in ((1, block), (16, 2 * block), (37, 3 * block), (100, max(block, 96))):
            if block == 1:
                cols += 1  # plain formats take any width
            data = random_matrix(rng, fmt, num_out, cols)
            weight = FORMATS[fmt].unpack(data).reshape(num_out, cols)
            inputs = {
                "x": rng.standard_normal((rows, cols), dtype=np.float32),
                "weight": weight,
                "bias": rng.standard_normal(num_out, dtype=np.float32),
            }
            rounding = 0.0 if fmt in ("F32", "F16") else ROUNDING[isa]
            if isa == "amx" and fmt not in ("F32", "F16", "BF16"):
                rounding = 2 * rounding + rounding**2  # tiles take weights rounded to bf16, too
            tolerance = op.tolerance(inputs, rounding)
            if fmt in LARGEST_TERM:
                # scale * sum(x q) and minimum * sum(x) are rounded apart, before they cancel.
                terms = np.abs(inputs["x"]).sum(axis=1, keepdims=True) * LARGEST_TERM[fmt]
                tolerance = tolerance + terms * 2.0**-24 * (cols + 8)
            assert_close(run_linear(isa, fmt, data, (num_out, cols), inputs), op.reference(**inputs), tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_a_row_does_not_depend_on_its_batch(fmt: str, isa: str) -> None:
    """Law 1 for matrix products: every row equals its solo run to the bit, with one thread or two."""
    rng = np.random.default_rng(4)
    cols, num_out = max(FORMATS[fmt].block_len, 32) * 2, 83
    data = random_matrix(rng, fmt, num_out, cols)
    x = rng.standard_normal((23, cols), dtype=np.float32)
    bias = rng.standard_normal(num_out, dtype=np.float32)
    together = run_linear(isa, fmt, data, (num_out, cols), {"x": x, "bias": bias})
    for rows in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 22):
        part = run_linear(isa, fmt, data, (num_out, cols), {"x": x[:rows], "bias": bias}, threads=1)
        np.testing.assert_array_equal(part, together[:rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("wide", [True, False], ids=["f32", "bf16"])
def test_attention_does_not_depend_on_chunks(isa: str, wide: bool) -> None:
    """Law 1 for attention: token by token, in chunks, or at once, on any blocks, with one thread or two."""
    rng = np.random.default_rng(5)
    for width, window in ((64, None), (64, 16), (200, 15), (256, 17), (32, 1)):
        inputs = OPS["attention"].example(rng, 150, width)
        inputs["window"] = window
        whole = run_attention(isa, inputs, wide=wide)
        for chunk, threads in ((1, 1), (5, 2), (16, 2), (64, 1)):
            part = run_attention(isa, inputs, wide=wide, chunk=chunk, threads=threads, seed=chunk)
            np.testing.assert_array_equal(part, whole)
