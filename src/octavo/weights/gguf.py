"""Reader of GGUF files (versions 2 and 3), mapped, with every length checked before it is used.

Format: ggml-org/ggml docs/gguf.md. A file is a header, key-value pairs, tensor descriptions, padding, data.
Models may be split into parts named NAME-00001-of-00003.gguf that carry `split.count`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import CorruptFileError, ModelError, ModelNotFoundError, UnsupportedError
from octavo.weights.files import Checkpoint, MappedFile, TensorView, clip, map_file
from octavo.weights.formats import BY_GGUF_ID

MAGIC = b"GGUF"
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME_BYTES = 1 << 16  # of keys and tensor names; the specification allows 2^16 - 1
MAX_SPLIT = 10_000
DEFAULT_ALIGNMENT = 32

# Types that exist in ggml and that this version cannot compute with; only to name them in messages.
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# Value types of the key-value section: type id -> struct code. 7 is bool, 8 string, 9 array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class _Cursor:
    """Reads forward through a mapped file; never past its end."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.pos = 0
        self.what = "header"  # what is being read, for messages

    def corrupt(self, problem: str) -> CorruptFileError:
        return CorruptFileError(f"{self.file.name}: corrupt GGUF file: {self.what}: {problem}")

    def need(self, num_bytes: int) -> int:
        """Start of the next `num_bytes` bytes, which are then passed; checked against the file size."""
        start = self.pos
        if num_bytes > self.file.size - start:
            raise self.corrupt(f"needs {num_bytes} bytes at offset {start}, but the file ends at {self.file.size}")
        self.pos = start + num_bytes
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.file.buffer, self.need(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.file.buffer, self.need(8))[0])

    def count(self, min_bytes: int, of: str) -> int:
        """A count of items that take at least `min_bytes` bytes each, so that it cannot exceed the file."""
        count = self.u64()
        if count > (self.file.size - self.pos) // min_bytes:
            raise self.corrupt(f"{count} {of} cannot fit in the rest of the file")
        return count

    def string(self, limit: int | None = None) -> str:
        length = self.u64()
        if limit is not None and length > limit:
            raise self.corrupt(f"a name of {length} bytes is too long")
        start = self.need(length)
        try:
            return self.file.buffer[start : self.pos].decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"the string at offset {start} is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """A run of `count` strings. The vocabulary is read here, so the loop is kept tight."""
        buffer, size, pos = self.file.buffer, self.file.size, self.pos
        length_at = _U64.unpack_from
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + length_at(buffer, pos)[0]
                if pos > size:
                    break
                append(buffer[start:pos].decode())
        except struct.error:
            pos = size + 1
        except UnicodeDecodeError:
            raise self.corrupt(f"the string at offset {start} is not UTF-8") from None
        if pos > size:
            raise self.corrupt(f"item {len(out)} of {count} runs past the end of the file at {size}")
        self.pos = pos
        return out

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        code = SCALARS.get(kind)
        if code is None:
            raise self.corrupt(f"unknown value type {kind}")
        reader = struct.Struct("<" + code)
        value = reader.unpack_from(self.file.buffer, self.need(reader.size))[0]
        return bool(value) if kind == BOOL else value

    def array(self) -> list[Any]:
        kind = self.u32()
        if kind == STRING:
            return self.strings(self.count(8, "strings"))
        if kind == ARRAY:
            raise UnsupportedError(f"{self.file.name}: {self.what}: nested arrays are not supported")
        code = SCALARS.get(kind)
        if code is None:
            raise self.corrupt(f"unknown array type {kind}")
        item = np.dtype("?" if kind == BOOL else "<" + code)
        count = self.count(item.itemsize, "items")
        start = self.need(count * item.itemsize)
        values = np.frombuffer(self.file.buffer, np.uint8, count * item.itemsize, start)
        if kind == BOOL:
            return [bool(value) for value in values]
        return list(values.view(item).tolist())


def _check_header(cursor: _Cursor) -> None:
    """Magic and version, with a helpful line for everything that is not little-endian GGUF 2 or 3."""
    name, buffer = cursor.file.name, cursor.file.buffer
    magic = bytes(buffer[:4])
    if magic != MAGIC:
        if magic in (b"lmgg", b"fmgg", b"tjgg", b"algg", b"GGML"):
            raise UnsupportedError(f"{name}: an old GGML file from before GGUF; convert it to GGUF version 3")
        raise CorruptFileError(f"{name}: not a GGUF file (it starts with {magic!r}, not {MAGIC!r})")
    cursor.need(4)
    version = cursor.u32()
    if version in (2, 3):
        return
    if version & 0xFFFF == 0 and version >> 16 != 0:
        raise UnsupportedError(f"{name}: a big-endian GGUF file; only little-endian files are supported")
    raise UnsupportedError(f"{name}: GGUF version {version} is not supported (versions 2 and 3 are)")


def _read_metadata(cursor: _Cursor, num_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_pairs):
        cursor.what = f"key {index} of {num_pairs}"
        key = cursor.string(MAX_NAME_BYTES)
        cursor.what = f"key {clip(key)}"
        if key in metadata:
            raise cursor.corrupt("given twice")
        metadata[key] = cursor.value(cursor.u32())
    return metadata


def _read_tensor_infos(cursor: _Cursor, num_tensors: int) -> list[tuple[str, tuple[int, ...], int, int]]:
    """(name, shape in row-major order, type id, offset in the data section) of every tensor."""
    infos = []
    for index in range(num_tensors):
        cursor.what = f"description {index} of {num_tensors} tensors"
        name = cursor.string(MAX_NAME_BYTES)
        cursor.what = f"tensor {clip(name)}"
        num_dims = cursor.u32()
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.corrupt(f"has {num_dims} dimensions")
        start = cursor.need(8 * num_dims)
        # GGUF lists the fastest dimension first.
        shape = tuple(reversed(struct.unpack_from(f"<{num_dims}Q", cursor.file.buffer, start)))
        if 0 in shape:
            raise cursor.corrupt(f"has an empty dimension: {shape}")
        infos.append((name, shape, cursor.u32(), cursor.u64()))
    return infos


def _view_tensors(
    cursor: _Cursor, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> dict[str, TensorView]:
    file = cursor.file
    base = (cursor.pos + alignment - 1) // alignment * alignment
    tensors: dict[str, TensorView] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, shape, type_id, offset in infos:
        cursor.what = f"tensor {clip(name)}"
        if name in tensors:
            raise cursor.corrupt("described twice")
        form = BY_GGUF_ID.get(type_id)
        if form is None:
            # Kept under its type's name: whether it is needed at all is for the loader to decide.
            type_name = f"type {type_id}" + (f" ({OTHER_TYPES[type_id]})" if type_id in OTHER_TYPES else "")
            tensors[name] = TensorView(name, shape, type_name, np.empty(0, np.uint8), file.name)
            continue
        if shape[-1] % form.block_len:
            raise cursor.corrupt(f"{form.name} needs rows of a multiple of {form.block_len} weights, not {shape[-1]}")
        num_bytes = prod(shape) // form.block_len * form.block_bytes
        if offset % alignment:
            raise cursor.corrupt(f"offset {offset} is not aligned to {alignment}")
        if base + offset + num_bytes > file.size:
            raise cursor.corrupt(
                f"its {num_bytes} bytes at offset {base + offset} reach past the end of the file at {file.size}; "
                "the file is incomplete"
            )
        tensors[name] = TensorView(name, shape, form.name, file.view(base + offset, num_bytes), file.name)
        ranges.append((offset, offset + num_bytes, name))
    ranges.sort()
    for (_, end, left), (begin, _, right) in pairwise(ranges):
        if begin < end:
            cursor.what = f"tensor {clip(right)}"
            raise cursor.corrupt(f"overlaps tensor {clip(left)}")
    return tensors


def _read_part(path: Path) -> Checkpoint:
    """One file, on its own."""
    cursor = _Cursor(map_file(path))
    _check_header(cursor)
    num_tensors = cursor.count(24, "tensors")
    num_pairs = cursor.count(13, "metadata keys")
    metadata = _read_metadata(cursor, num_pairs)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    cursor.what = "key 'general.alignment'"
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.corrupt(f"{clip(alignment)} is not a power of two")
    infos = _read_tensor_infos(cursor, num_tensors)
    return Checkpoint("gguf", _view_tensors(cursor, infos, alignment), metadata)


def part_paths(path: Path, split_count: int) -> list[Path]:
    """The files of a split model, in order, given any one of them.

    Raises CorruptFileError if the name does not say which part it is, ModelNotFoundError naming missing parts.
    """
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", path.name)
    if match is None or int(match[3]) != split_count:
        raise CorruptFileError(
            f"{path.name}: one of {split_count} parts of a model, but not named NAME-00001-of-{split_count:05}.gguf"
        )
    paths = [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}{match[4]}") for i in range(1, split_count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelNotFoundError(f"{path.name}: incomplete model: the part {missing[0]}{more} is missing")
    return paths


def read_gguf(path: Path, progress: Callable[[str, int, int | None], None] | None = None) -> Checkpoint:
    """Open a GGUF model, all parts of it if it is split.

    Tensor names and metadata are the file's own. A tensor of a type that is not supported is kept with
    an empty `data` and its type as `format`. Raises CorruptFileError, UnsupportedError or ModelNotFoundError,
    naming file and tensor or key.
    """
    if path.is_dir():
        raise ModelError(f"{path}: a directory, not a GGUF file")
    if re.search(r"\.part\d+of\d+$", path.name):
        raise CorruptFileError(f"{path.name}: incomplete file: one piece of a cut file; join all its pieces first")
    first = _read_part(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_SPLIT:
        raise CorruptFileError(f"{path.name}: corrupt GGUF file: key 'split.count': {clip(count)}")
    if count <= 1:
        return first
    paths = part_paths(path, count)
    parts = []
    for index, part_path in enumerate(paths):
        if progress is not None:
            progress("Opening weights", index, count)
        part = first if part_path.name == path.name else _read_part(part_path)
        if part.metadata.get("split.count") != count or part.metadata.get("split.no") != index:
            raise CorruptFileError(f"{part_path.name}: does not say that it is part {index + 1} of {count}")
        parts.append(part)
    return _merge(path, parts)


def _merge(path: Path, parts: list[Checkpoint]) -> Checkpoint:
    """All tensors under the metadata of the first part."""
    tensors: dict[str, TensorView] = {}
    for part in parts:
        for name, view in part.tensors.items():
            if name in tensors:
                raise CorruptFileError(f"{view.source}: tensor {clip(name)} is also in {tensors[name].source}")
            tensors[name] = view
    total = parts[0].metadata.get("split.tensors.count")
    if total is not None and total != len(tensors):
        raise CorruptFileError(f"{path.name}: the parts hold {len(tensors)} tensors, not 'split.tensors.count'")
    return Checkpoint("gguf", tensors, parts[0].metadata, [f"{len(parts)} files"])
