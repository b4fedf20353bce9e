"""Every op of the contract against its reference, on every instruction set of this machine, ragged sizes."""

from __future__ import annotations

import numpy as np
import pytest
from ops.native_ops import BF16_ATTENTION, INT8_PRODUCTS, ISAS, ROUNDING, run_attention, run_linear, run_op

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


KV_DTYPES = ("float32", "bfloat16", "int8")


def as_kept(values: np.ndarray, dtype: str, head_dim: int) -> np.ndarray:
    """What a cache of `dtype` makes of keys or values [tokens, heads * head_dim]."""
    if dtype == "float32":
        return values
    if dtype == "bfloat16":
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    heads = values.reshape(len(values), -1, head_dim)
    scale = np.abs(heads).max(axis=2, keepdims=True) / np.float32(127)
    scale = ((scale.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)  # bf16, rounded up
    kept: np.ndarray = np.rint(heads * (np.float32(1) / scale)) * scale
    return kept.reshape(values.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_attention_matches_reference(isa: str, kv: str) -> None:
    op = OPS["attention"]
    rng = np.random.default_rng(2)
    for rows in ROWS:
        for width in (8, 24, 64, 128, 200, 256):
            inputs = op.example(rng, rows, width)
            kept = {key: as_kept(inputs[key], kv, inputs["head_dim"]) for key in ("k", "v")}
            if kv == "bfloat16":  # values that bf16 holds exactly, so that the same tolerance applies
                inputs |= kept
            rounding = ROUNDING[isa] if isa in BF16_ATTENTION and kv == "bfloat16" else 0.0
            expected = inputs | kept
            assert_close(run_attention(isa, inputs, kv=kv), op.reference(**expected), op.tolerance(expected, rounding))


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
# The same where signed integers are made unsigned, and 8 or 128 times the scale is taken away again.
LARGEST_UNSIGNED_TERM = {"Q4_0": 1.5, "Q5_0": 25.6, "Q8_0": 25.6, "Q5_1": 25.6, "Q3_K": 819, "Q5_K": 1613, "Q6_K": 3264}


def apart(fmt: str, isa: str, x: np.ndarray) -> np.ndarray:
    """What rounding terms before they cancel may cost a row."""
    largest = LARGEST_TERM.get(fmt, 0.0)
    if isa in INT8_PRODUCTS:
        largest += LARGEST_UNSIGNED_TERM.get(fmt, 0.0)
    return np.abs(x).sum(axis=1, keepdims=True) * largest * 2.0**-24 * (x.shape[1] + 8)


def half_steps(x: np.ndarray) -> np.ndarray:
    """Most that each value errs in 8 bits: half of its group's step, and the rounding of that.

    The step is the largest magnitude / 127, rounded up to two bits of mantissa; values above 5.2 times the row's root
    mean square stay floats, and have none.
    """
    rows, cols = x.shape
    magnitude = np.zeros((rows, -(-cols // 32) * 32), dtype=np.float32)
    magnitude[:, :cols] = np.abs(x)
    large = magnitude > 5.2 * np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True))
    most = magnitude.max(axis=1, keepdims=True)
    large &= (most >= 1e-15) & (most < 1e18)  # else their squares are no floats
    largest = np.where(large, np.float32(0), magnitude).reshape(rows, -1, 32).max(axis=2) / np.float32(127)
    rest = np.int32(2**21 - 1)
    steps = ((largest.view(np.int32) + rest) & ~rest).view(np.float32)
    return np.where(large, 0.0, np.repeat(steps / 2 * (1 + 2.0**-16), 32, axis=1))[:, :cols]


INT8_ISAS = [isa for isa in ISAS if isa in INT8_PRODUCTS]


def check_rows(fmt: str, isa: str, data: np.ndarray, num_out: int, x: np.ndarray, parts: tuple[int, ...]) -> None:
    """The product with every row is within its steps, and the same for the first rows alone, with one thread."""
    op, shape = OPS["linear"], (num_out, x.shape[1])
    inputs = {"x": x, "weight": FORMATS[fmt].unpack(data).reshape(shape), "bias": np.zeros(num_out, np.float32)}
    tolerance = op.tolerance(inputs, 0.0) + half_steps(x) @ np.abs(inputs["weight"]).T
    together = run_linear(isa, fmt, data, shape, inputs)
    assert_close(together, op.reference(**inputs), tolerance + apart(fmt, isa, x))
    for rows in parts:
        part = run_linear(isa, fmt, data, shape, {"x": x[:rows], "bias": inputs["bias"]}, threads=1)
        np.testing.assert_array_equal(part, together[:rows])


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("fmt", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("unit", [1.0, 1e-30, 1e25])
def test_large_values_keep_the_resolution_of_the_rest(unit: float, fmt: str, isa: str) -> None:
    """A value far above the row's root mean square is multiplied as a float, in any batch."""
    rng = np.random.default_rng(6)
    num_out, cols = 83, 1024
    data = random_matrix(rng, fmt, num_out, cols)
    x = rng.standard_normal((31, cols), dtype=np.float32)
    for r in range(31):
        x[r, [3, 40 + 30 * r, 700, 701]] = 100.0, -80.0, 90.0, 100.0
    x[7] = 0.0
    x[8, 5:] = 0.0
    check_rows(fmt, isa, data, num_out, x * np.float32(unit), (1, 2, 5, 8, 23))


@pytest.mark.parametrize("isa", INT8_ISAS)
def test_large_values_of_a_matrix_a_little_wider_than_the_last(isa: str) -> None:
    """Rows of 1,024 values are as far apart as those of 1,056, but have fewer channels."""
    rng = np.random.default_rng(10)
    narrow, wide = (random_matrix(rng, "Q4_0", 16, cols) for cols in (1024, 1056))
    x = rng.standard_normal((40, 1056), dtype=np.float32)
    x[:, 1024:] *= 100.0
    inputs = {"x": x, "bias": np.zeros(16, np.float32)}
    alone = run_linear(isa, "Q4_0", wide, (16, 1056), inputs)
    np.testing.assert_array_equal(run_linear(isa, "Q4_0", wide, (16, 1056), inputs, after=(narrow, (16, 1024))), alone)


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("fmt", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K"])
def test_rows_of_any_spread(fmt: str, isa: str) -> None:
    """From alike values to a few that are all there is, at any magnitude, some rows zero."""
    rng = np.random.default_rng(9)
    for spread, unit, rows in ((0, 1e-20, 24), (1, 1e14, 65), (3, 1.0, 131), (6, 1e-10, 30)):
        num_out, cols = int(rng.integers(1, 90)), FORMATS[fmt].block_len * int(rng.integers(1, 6))
        x = rng.standard_normal((rows, cols)) * np.exp(rng.normal(0, spread, (rows, cols))) * unit
        x[rng.random(rows) < 0.1] = 0
        check_rows(fmt, isa, random_matrix(rng, fmt, num_out, cols), num_out, x.astype(np.float32), (rows // 3,))


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("fmt", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_number_stays_none_and_in_its_row(value: float, fmt: str, isa: str) -> None:
    rng = np.random.default_rng(7)
    data = random_matrix(rng, fmt, 20, 256)
    x = rng.standard_normal((4, 256), dtype=np.float32)
    bias = np.zeros(20, np.float32)
    expected = run_linear(isa, fmt, data, (20, 256), {"x": x, "bias": bias})
    x[2, 100] = value
    result = run_linear(isa, fmt, data, (20, 256), {"x": x, "bias": bias})
    assert not np.isfinite(result[2]).any()
    np.testing.assert_array_equal(result[[0, 1, 3]], expected[[0, 1, 3]])


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("fmt", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_no_number_shows(scale: float, fmt: str, isa: str) -> None:
    """Exponents are added to scales, which would make a number of it."""
    rng = np.random.default_rng(8)
    data = random_matrix(rng, fmt, 20, 64).reshape(20, -1)
    data[3, :2] = np.array([scale], np.float16).view(np.uint8)
    x = np.abs(rng.standard_normal((30, 64), dtype=np.float32)) + 1
    result = run_linear(isa, fmt, data.reshape(-1), (20, 64), {"x": x, "bias": np.zeros(20, np.float32)})
    assert not np.isfinite(result[:, 3]).any()
    assert np.isfinite(np.delete(result, 3, axis=1)).all()


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
            steps: np.ndarray | float = 0.0
            if isa in INT8_PRODUCTS and fmt not in ("F32", "F16", "BF16"):
                rounding, steps = 0.0, half_steps(inputs["x"]) @ np.abs(weight).T
            if isa == "amx" and fmt not in ("F32", "F16", "BF16"):
                rounding = 2 * rounding + rounding**2  # tiles take weights rounded to bf16, too
            tolerance = op.tolerance(inputs, rounding) + steps
            if fmt in LARGEST_TERM or isa in INT8_PRODUCTS:
                # scale * sum(x q) and minimum * sum(x) are rounded apart, before they cancel.
                tolerance = tolerance + apart(fmt, isa, inputs["x"])
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
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_attention_does_not_depend_on_chunks(isa: str, kv: str) -> None:
    """Law 1 for attention: token by token, in chunks, or at once, on any blocks, with one thread or two."""
    rng = np.random.default_rng(5)
    for width, window in ((64, None), (64, 16), (200, 15), (256, 17), (32, 1)):
        inputs = OPS["attention"].example(rng, 150, width)
        inputs["window"] = window
        whole = run_attention(isa, inputs, kv=kv)
        for chunk, threads in ((1, 1), (5, 2), (16, 2), (64, 1)):
            part = run_attention(isa, inputs, kv=kv, chunk=chunk, threads=threads, seed=chunk)
            np.testing.assert_array_equal(part, whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_long_attention_does_not_depend_on_its_threads(isa: str, kv: str) -> None:
    """A long context's spans are attended to by one thread, or each by another; the last token alone, or in a tile."""
    op = OPS["attention"]
    rng = np.random.default_rng(6)
    for window in (None, 300, 70):
        inputs = op.example(rng, 700, 64)
        inputs = {**inputs, "k": inputs["k"][-700:], "v": inputs["v"][-700:], "positions": np.arange(700)}
        inputs["window"] = window
        whole = run_attention(isa, inputs, kv=kv, threads=1)
        for chunk, threads in ((699, 1), (699, 2), (233, 3)):  # the last chunk is one token
            part = run_attention(isa, inputs, kv=kv, chunk=chunk, threads=threads)
            np.testing.assert_array_equal(part, whole)
        kept = {key: as_kept(inputs[key], kv, inputs["head_dim"]) for key in ("k", "v")}
        if kv != "bfloat16":
            expected = inputs | kept
            assert_close(whole, op.reference(**expected), op.tolerance(expected, 0.0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_attention_of_what_is_no_number_is_none_and_stays_in_its_row(isa: str, kv: str) -> None:
    if isa in BF16_ATTENTION and kv == "bfloat16":
        pytest.skip("its weights are rounded, and a maximum swallows what is no number")
    inputs = OPS["attention"].example(np.random.default_rng(7), 150, 64)
    whole = run_attention(isa, inputs, kv=kv)
    q = inputs["q"].copy()
    q[145] = np.nan
    got = run_attention(isa, inputs | {"q": q}, kv=kv)
    assert np.isnan(got[145]).all()
    np.testing.assert_array_equal(np.delete(got, 145, axis=0), np.delete(whole, 145, axis=0))
