"""Writes GGUF files byte by byte, so that tests can also write wrong ones."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from octavo.weights.formats import FORMATS, WeightFormat

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True)
class Typed:
    """A metadata value with an explicit GGUF type; `item` is the element type of an array."""

    kind: int
    value: Any
    item: int = U32


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> Typed:
    """A type for a plain Python value."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, list):
        return Typed(ARRAY, value, typed(value[0]).kind if value else U32)
    kinds = {bool: BOOL, int: U32, float: F32, str: STRING, bytes: STRING}
    return Typed(kinds[type(value)], value)


def pack(kind: int, value: Any) -> bytes:
    return string(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)


def pair(key: str, value: Any) -> bytes:
    entry = typed(value)
    head = string(key) + struct.pack("<I", entry.kind)
    if entry.kind != ARRAY:
        return head + pack(entry.kind, entry.value)
    items = b"".join(pack(entry.item, item) for item in entry.value)
    return head + struct.pack("<IQ", entry.item, len(entry.value)) + items


@dataclass
class Tensor:
    """One tensor; every field can be made to lie. `shape` is row-major; `offset` None means "in order"."""

    name: str
    shape: tuple[int, ...]
    data: bytes
    type_id: int = 0
    offset: int | None = None


@dataclass
class GgufFile:
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_pairs: int | None = None

    def to_bytes(self) -> bytes:
        alignment = int(self.metadata.get("general.alignment", 32))
        out = self.magic + struct.pack("<I", self.version)
        out += struct.pack("<Q", len(self.tensors) if self.num_tensors is None else self.num_tensors)
        out += struct.pack("<Q", len(self.metadata) if self.num_pairs is None else self.num_pairs)
        out += b"".join(pair(key, value) for key, value in self.metadata.items())
        data = b""
        for tensor in self.tensors:
            data += bytes(-len(data) % alignment)
            offset = len(data) if tensor.offset is None else tensor.offset
            dims = tensor.shape[::-1]
            out += string(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            out += struct.pack("<IQ", tensor.type_id, offset)
            data += tensor.data
        return out + bytes(-len(out) % alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def float_tensor(name: str, values: np.ndarray) -> Tensor:
    return Tensor(name, values.shape, np.ascontiguousarray(values, dtype="<f4").tobytes())


def quantised_tensor(name: str, shape: tuple[int, ...], form: WeightFormat, rng: np.random.Generator) -> Tensor:
    """Random bytes: any bytes are valid weights."""
    num_bytes = prod(shape) // form.block_len * form.block_bytes
    return Tensor(name, shape, rng.integers(0, 256, num_bytes, dtype=np.uint8).tobytes(), form.gguf_id)


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """q or k rows from Hugging Face's half-split order to llama.cpp's interleaved order."""
    half = rows.shape[0] // num_heads // 2
    grouped = rows.reshape(num_heads, 2, half, *rows.shape[1:])
    return np.ascontiguousarray(grouped.swapaxes(1, 2)).reshape(rows.shape)


_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if hf_name in top:
        return top[hf_name] + ".weight"
    _, _, layer, rest = hf_name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[stem]}.{kind}"


def model_file(
    architecture: str, hf_tensors: dict[str, np.ndarray], sizes: dict[str, Any], extra: dict[str, Any] | None = None
) -> GgufFile:
    """A float32 GGUF model from Hugging Face tensors, permuted as llama.cpp's converter does.

    `sizes`: num_layers, hidden, inner, heads, kv_heads, context and, optionally, head_dim.
    """
    head_dim = sizes.get("head_dim", sizes["hidden"] // sizes["heads"])
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": sizes["num_layers"],
        f"{architecture}.context_length": sizes["context"],
        f"{architecture}.embedding_length": sizes["hidden"],
        f"{architecture}.feed_forward_length": sizes["inner"],
        f"{architecture}.attention.head_count": sizes["heads"],
        f"{architecture}.attention.head_count_kv": sizes["kv_heads"],
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.rope.dimension_count": head_dim,
        **(extra or {}),
    }
    tensors = []
    for name, values in hf_tensors.items():
        if architecture == "llama" and ".q_proj." in name:
            values = interleave(values, sizes["heads"])
        if architecture == "llama" and ".k_proj." in name:
            values = interleave(values, sizes["kv_heads"])
        tensors.append(float_tensor(gguf_name(name), values))
    return GgufFile(metadata, tensors)


ALL_FORMATS = list(FORMATS.values())
