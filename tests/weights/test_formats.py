"""The oracle of every format equals the gguf package's dequantisation, bit for bit, on any bytes."""

import warnings

import numpy as np
import pytest

from octavo.weights.formats import FORMATS

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("name", FORMATS)
def test_unpack_is_bit_exact(name: str) -> None:
    form = FORMATS[name]
    kind = gguf.GGMLQuantizationType[name]
    assert (form.block_len, form.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert form.gguf_id == kind.value
    data = np.random.default_rng(1).integers(0, 256, (40, 5 * form.block_bytes), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random scales are sometimes infinite or NaN
        expected = gguf.dequantize(data, kind).reshape(-1)
    ours = form.unpack(data)
    assert ours.dtype == np.float32
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(ours), is_nan)
    np.testing.assert_array_equal(ours[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_unpack_of_nothing_and_row_bytes(name: str) -> None:
    form = FORMATS[name]
    assert form.unpack(np.empty(0, np.uint8)).shape == (0,)
    assert form.row_bytes(3 * form.block_len) == 3 * form.block_bytes


def test_known_values() -> None:
    """One block worked out by hand, independent of any library."""
    # Q4_1: d = 0.5, m = -1.0; byte i holds weight i (low) and weight i + 16 (high).
    block = np.frombuffer(np.float16(0.5).tobytes() + np.float16(-1).tobytes() + bytes([0x31] * 16), np.uint8)
    np.testing.assert_array_equal(FORMATS["Q4_1"].unpack(block), [-0.5] * 16 + [0.5] * 16)
    # Q8_0: d = 2, quants -128..-97.
    quants = np.arange(-128, -96, dtype=np.int8)
    block = np.frombuffer(np.float16(2).tobytes() + quants.tobytes(), np.uint8)
    np.testing.assert_array_equal(FORMATS["Q8_0"].unpack(block), 2.0 * quants)
    # BF16: the upper half of a float32.
    np.testing.assert_array_equal(FORMATS["BF16"].unpack(np.array([0x80, 0x3F], np.uint8)), [1.0])
