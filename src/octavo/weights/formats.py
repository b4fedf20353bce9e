"""Weight formats: the layout of a block of weights, and the scalar truth of what it means.

`unpack` is the oracle: kernels may repack a format, but must reproduce it bit for bit. Layouts follow
ggml-common.h and the dequantize_row_* functions of ggml-quants.c (ggml-org/ggml). All multi-byte fields
are little-endian; "d" is a block's scale, "m"/"dmin" its offset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.void]  # one structured element per block


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format. `block_len` weights are stored in `block_bytes` bytes; rows hold whole blocks."""

    name: str
    gguf_id: int
    block_len: int
    layout: np.dtype[np.void]
    values: Callable[[Blocks], F32]  # (num_blocks,) -> (num_blocks, block_len)

    @property
    def block_bytes(self) -> int:
        return self.layout.itemsize

    def row_bytes(self, num_cols: int) -> int:
        """Bytes of a row of `num_cols` weights, a multiple of block_len."""
        assert num_cols % self.block_len == 0
        return num_cols // self.block_len * self.block_bytes

    def unpack(self, data: npt.NDArray[np.uint8]) -> F32:
        """All weights in `data` (uint8, whole blocks) as float32, 1-D, in the order of storage."""
        raw = np.ascontiguousarray(data).reshape(-1)
        if raw.size == 0:
            return np.empty(0, np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # scales may be NaN or infinite: data, not a fault
            return self.values(raw.view(self.layout)).reshape(-1)


def _nibbles(packed: npt.NDArray[np.uint8], group: int) -> npt.NDArray[np.uint8]:
    """Bytes to 4-bit values: in each group of `group` bytes all low halves come first, then all high halves."""
    grouped = packed.reshape(len(packed), -1, 1, group)
    return np.concatenate([grouped & 15, grouped >> 4], axis=2).reshape(len(packed), -1)


def _crumbs(packed: npt.NDArray[np.uint8], group: int) -> npt.NDArray[np.uint8]:
    """Bytes to 2-bit values, by the same rule with four planes per group."""
    grouped = packed.reshape(len(packed), -1, 1, group)
    return np.concatenate([grouped >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(len(packed), -1)


def _bit_planes(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """32 bytes to 256 bits: plane b holds bit b of every byte."""
    return np.stack([packed >> bit & 1 for bit in range(8)], axis=1).reshape(len(packed), -1)


def _float(field: npt.NDArray[np.generic]) -> F32:
    """One float32 per block, as a column."""
    return field.astype(np.float32).reshape(-1, 1)


def _plain(blocks: Blocks) -> F32:
    return blocks["w"].astype(np.float32)


def _bf16(blocks: Blocks) -> F32:
    return (blocks["w"].astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Blocks) -> F32:
    return _float(blocks["d"]) * (_nibbles(blocks["q"], 16).astype(np.float32) - 8)


def _q4_1(blocks: Blocks) -> F32:
    return _float(blocks["d"]) * _nibbles(blocks["q"], 16).astype(np.float32) + _float(blocks["m"])


def _five_bits(blocks: Blocks) -> F32:
    """Q5_0 and Q5_1 keep bit 4 of weight i in bit i of a 32-bit word."""
    high = np.unpackbits(blocks["h"], axis=1, bitorder="little")
    return (_nibbles(blocks["q"], 16) | high << 4).astype(np.float32)


def _q5_0(blocks: Blocks) -> F32:
    return _float(blocks["d"]) * (_five_bits(blocks) - 16)


def _q5_1(blocks: Blocks) -> F32:
    return _float(blocks["d"]) * _five_bits(blocks) + _float(blocks["m"])


def _q8_0(blocks: Blocks) -> F32:
    return blocks["q"].astype(np.float32) * _float(blocks["d"])


def _scaled(blocks: Blocks, quants: npt.NDArray[np.generic], scales: npt.NDArray[np.generic]) -> F32:
    """d * scale * quant, with one integer scale per group of weights; (num_blocks, groups, group length)."""
    scale = _float(blocks["d"]) * scales.astype(np.float32)
    return scale[:, :, None] * quants.reshape(len(blocks), scales.shape[1], -1).astype(np.float32)


def _minus_min(blocks: Blocks, scaled: F32, mins: npt.NDArray[np.generic]) -> F32:
    """Subtract dmin * min, one integer min per group."""
    return scaled - (_float(blocks["dmin"]) * mins.astype(np.float32))[:, :, None]


def _q2_k(blocks: Blocks) -> F32:
    scales = blocks["scales"]
    return _minus_min(blocks, _scaled(blocks, _crumbs(blocks["q"], 32), scales & 15), scales >> 4)


def _q3_k(blocks: Blocks) -> F32:
    # 16 six-bit scales: low nibbles of 0..7 then of 8..15 in bytes 0..7, top two bits as planes of bytes 8..11.
    packed = blocks["scales"]
    scales = (_nibbles(packed[:, :8], 8) | _crumbs(packed[:, 8:], 4) << 4).astype(np.int8) - 32
    # The third bit is stored inverted: set means "do not subtract 4".
    quants = _crumbs(blocks["q"], 32).astype(np.int8) - (4 - 4 * _bit_planes(blocks["h"]).astype(np.int8))
    return _scaled(blocks, quants, scales)


def _scales_and_mins(packed: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Eight six-bit scales and mins from the 12 bytes of Q4_K and Q5_K.

    Bytes 0..3 hold scales 0..3, bytes 4..7 mins 0..3; bytes 8..11 the low nibbles of scales (low) and mins (high)
    4..7, whose two top bits are the top bits of bytes 0..7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    mins = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales, mins


def _q4_k(blocks: Blocks) -> F32:
    scales, mins = _scales_and_mins(blocks["scales"])
    return _minus_min(blocks, _scaled(blocks, _nibbles(blocks["q"], 32), scales), mins)


def _q5_k(blocks: Blocks) -> F32:
    scales, mins = _scales_and_mins(blocks["scales"])
    quants = _nibbles(blocks["q"], 32) | _bit_planes(blocks["h"]) << 4
    return _minus_min(blocks, _scaled(blocks, quants, scales), mins)


def _q6_k(blocks: Blocks) -> F32:
    quants = (_nibbles(blocks["q"], 64) | _crumbs(blocks["h"], 32) << 4).astype(np.int8) - 32
    return _scaled(blocks, quants, blocks["scales"])


def _format(name: str, gguf_id: int, block_len: int, values: Callable[[Blocks], F32], **fields: str) -> WeightFormat:
    return WeightFormat(name, gguf_id, block_len, np.dtype(list(fields.items())), values)


FORMATS: dict[str, WeightFormat] = {
    entry.name: entry
    for entry in (
        _format("F32", 0, 1, _plain, w="<f4"),
        _format("F16", 1, 1, _plain, w="<f2"),
        _format("BF16", 30, 1, _bf16, w="<u2"),
        _format("Q4_0", 2, 32, _q4_0, d="<f2", q="16u1"),
        _format("Q4_1", 3, 32, _q4_1, d="<f2", m="<f2", q="16u1"),
        _format("Q5_0", 6, 32, _q5_0, d="<f2", h="4u1", q="16u1"),
        _format("Q5_1", 7, 32, _q5_1, d="<f2", m="<f2", h="4u1", q="16u1"),
        _format("Q8_0", 8, 32, _q8_0, d="<f2", q="32i1"),
        _format("Q2_K", 10, 256, _q2_k, scales="16u1", q="64u1", d="<f2", dmin="<f2"),
        _format("Q3_K", 11, 256, _q3_k, h="32u1", q="64u1", scales="12u1", d="<f2"),
        _format("Q4_K", 12, 256, _q4_k, d="<f2", dmin="<f2", scales="12u1", q="128u1"),
        _format("Q5_K", 13, 256, _q5_k, d="<f2", dmin="<f2", scales="12u1", h="32u1", q="128u1"),
        _format("Q6_K", 14, 256, _q6_k, q="128u1", h="64u1", scales="16i1", d="<f2"),
    )
}
"""Every format that weights may have, by name."""

BY_GGUF_ID: dict[int, WeightFormat] = {entry.gguf_id: entry for entry in FORMATS.values()}
