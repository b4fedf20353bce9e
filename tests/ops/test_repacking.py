"""The packed form of every weight format gives back exactly what `unpack` gives, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from ops.native_ops import ISAS
from ops.test_contract import random_matrix

from octavo import _native
from octavo.weights.formats import FORMATS


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_repacked_equals_unpack(fmt: str) -> None:
    rng = np.random.default_rng(6)
    block = FORMATS[fmt].block_len
    for rows, blocks in ((1, 1), (16, 2), (35, 3)):
        cols = blocks * block + (5 if block == 1 else 0)
        data = random_matrix(rng, fmt, rows, cols)
        expected = FORMATS[fmt].unpack(data).reshape(rows, cols)
        np.testing.assert_array_equal(_native.unpack(fmt, data, rows, cols), expected)
        for isa in ISAS:
            np.testing.assert_array_equal(_native.unpack_repacked(isa, fmt, data, rows, cols), expected, err_msg=isa)


def test_every_half_float_scale_survives() -> None:
    """All 63,488 finite half floats as the scale of a Q8_0 block with weights -128..127."""
    scales = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    scales = scales[np.isfinite(scales.view(np.float16))]
    blocks = np.empty((scales.size, 34), dtype=np.uint8)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    blocks[:, 2:] = np.resize(np.arange(256, dtype=np.uint8), (scales.size, 32))
    data = blocks.reshape(-1)
    expected = FORMATS["Q8_0"].unpack(data).reshape(scales.size, 32)
    for isa in ISAS:
        np.testing.assert_array_equal(_native.unpack_repacked(isa, "Q8_0", data, scales.size, 32), expected)
