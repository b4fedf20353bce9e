"""Random weights of any format, at the speed of memory: for tests and benchmarks without a checkpoint."""

from __future__ import annotations

import zlib
from math import prod
from typing import Any

import numpy as np

from octavo.weights.files import Bytes, Progress, TensorView
from octavo.weights.formats import FORMATS, WeightFormat

# Blocks get random quants and these fixed scales, so that weights have mean ~0 and a deviation of ~0.02, as freshly
# initialised models have. sigma(q) is the deviation of the uniform quant: 4.6 for 4 bits, 74 for 8 bits.
# Six-bit scales of the K formats are all 32 (0xA0 packs 32 together with the top bits of the fifth and following).
_SIGMA = 0.02
_FIXED: dict[str, dict[str, Any]] = {
    "Q4_0": {"d": _SIGMA / 4.61},
    "Q4_1": {"d": _SIGMA / 4.61, "m": -7.5 * _SIGMA / 4.61},
    "Q5_0": {"d": _SIGMA / 9.23},
    "Q5_1": {"d": _SIGMA / 9.23, "m": -15.5 * _SIGMA / 9.23},
    "Q8_0": {"d": _SIGMA / 73.6},
    "Q2_K": {"d": _SIGMA / 1.12 / 8, "dmin": 1.5 * _SIGMA / 1.12 / 8, "scales": 0x88},
    "Q3_K": {"d": _SIGMA / 2.29 / 16, "scales": [0] * 8 + [0xFF] * 4},  # 48 - 32 = 16
    "Q4_K": {"d": _SIGMA / 4.61 / 32, "dmin": 7.5 * _SIGMA / 4.61 / 32, "scales": [0xA0] * 8 + [0] * 4},
    "Q5_K": {"d": _SIGMA / 9.23 / 32, "dmin": 15.5 * _SIGMA / 9.23 / 32, "scales": [0xA0] * 8 + [0] * 4},
    "Q6_K": {"d": _SIGMA / 18.5 / 32, "scales": 32},
}
# Plain formats keep sign, mantissa and the lowest exponent bit of random words: magnitudes from 2^-7 to 2^-5.
_PLAIN = {
    "F32": (np.uint32, 0x80FFFFFF, 120 << 23),
    "BF16": (np.uint16, 0x80FF, 120 << 7),
    "F16": (np.uint16, 0x87FF, 8 << 10),
}


def random_rows(form: WeightFormat, num_weights: int, seed: int, name: str) -> Bytes:
    """`num_weights` random weights (whole blocks) as raw bytes, a function of `seed` and `name` alone."""
    num_bytes = num_weights // form.block_len * form.block_bytes
    generator = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    words = generator.integers(0, 1 << 64, (num_bytes + 7) // 8, dtype=np.uint64)
    if form.name == "Q8_0":
        words |= np.uint64(0x0101010101010101)  # odd quants only: quantisers never write -128
    data = words.view(np.uint8)[:num_bytes]
    if form.name in _PLAIN:
        kind, mask, exponent = _PLAIN[form.name]
        bits = data.view(kind)
        bits &= kind(mask)
        bits |= kind(exponent)
        return data
    blocks = data.view(form.layout)
    for field, value in _FIXED[form.name].items():
        blocks[field] = value
    return data


def dummy_tensors(
    shapes: dict[str, tuple[int, ...]],
    format_name: str,
    seed: int,
    progress: Progress | None = None,
) -> tuple[dict[str, TensorView], list[str]]:
    """Random tensors of the given shapes, and remarks.

    Matrices get `format_name`, or Q8_0 or F16 if their rows are no whole number of its blocks; norms are ones and
    biases random, both in F32.
    """
    tensors: dict[str, TensorView] = {}
    fallbacks: set[str] = set()
    total = sum(prod(shape) for shape in shapes.values())
    done = 0
    for name, shape in shapes.items():
        if len(shape) == 1:
            form = FORMATS["F32"]
        else:
            form = next(FORMATS[n] for n in (format_name, "Q8_0", "F16") if shape[-1] % FORMATS[n].block_len == 0)
            if form.name != format_name:
                fallbacks.add(form.name)
        if name.endswith("norm.weight"):
            data = np.ones(shape, np.float32).view(np.uint8)
        else:
            data = random_rows(form, prod(shape), seed, name)
        tensors[name] = TensorView(name, shape, form.name, data, "random weights")
        done += prod(shape)
        if progress is not None:
            progress("Making random weights", done, total)
    notes = [f"{' and '.join(sorted(fallbacks))} where rows do not fit {format_name}"] if fallbacks else []
    return tensors, notes
