"""Reader of safetensors files, mapped, with every rule of the format checked.

Format: github.com/huggingface/safetensors, "Format". A file is an 8-byte little-endian header length, a JSON header,
and the data, which the tensors' [begin, end) offsets cover without holes or overlaps. A sharded model has an index,
model.safetensors.index.json, that says which file holds each tensor; the index decides.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from octavo.errors import CorruptFileError, ModelNotFoundError, UnsupportedError
from octavo.weights.files import Checkpoint, MappedFile, Progress, TensorView, clip, map_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
MAX_DIMS = 8

# dtype -> bits per element. Only F32, F16 and BF16 can be computed with; the others may lie unused in a file.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys must differ."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {clip(twice)} given twice")
    return result


def _parse_json(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{where} is not valid JSON: {clip(error)}") from None
    if not isinstance(value, dict):
        raise CorruptFileError(f"{where} is not a JSON object")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The JSON header and the offset of the data."""
    if file.size < 8:
        raise CorruptFileError(f"{file.name}: corrupt safetensors file: only {file.size} bytes long")
    length = int.from_bytes(file.buffer[:8], "little")
    if length > MAX_HEADER_BYTES or length > file.size - 8:
        raise CorruptFileError(
            f"{file.name}: corrupt safetensors file: a header of {length} bytes does not fit (file: {file.size} bytes)"
        )
    if file.buffer[8:9] != b"{":
        raise CorruptFileError(f"{file.name}: corrupt safetensors file: the header does not start with '{{'")
    header = _parse_json(file.buffer[8 : 8 + length], f"{file.name}: corrupt safetensors file: the header")
    return header, 8 + length


def _check_entry(file: MappedFile, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one tensor, consistent with itself."""

    def corrupt(problem: str) -> CorruptFileError:
        return CorruptFileError(f"{file.name}: corrupt safetensors file: tensor {clip(name)}: {problem}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise corrupt("must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise corrupt(f"dtype {clip(dtype)} is not a name")
    if dtype not in DTYPE_BITS:
        raise UnsupportedError(f"{file.name}: tensor {clip(name)}: dtype {clip(dtype)} is not supported")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_count(dim) for dim in shape):
        raise corrupt(f"shape {clip(shape)} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise corrupt(f"data_offsets {clip(offsets)} are not two positions")
    begin, end = offsets
    num_bytes = prod(shape) * DTYPE_BITS[dtype] // 8
    if end - begin != num_bytes:
        raise corrupt(f"{dtype} {shape} takes {num_bytes} bytes, but data_offsets are [{begin}, {end}]")
    return dtype, tuple(shape), begin, end


def read_file(path: Path) -> tuple[dict[str, TensorView], dict[str, str]]:
    """The tensors and the `__metadata__` of one file. Raises CorruptFileError naming file and tensor."""
    file = map_file(path)
    header, base = _read_header(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptFileError(f"{file.name}: corrupt safetensors file: __metadata__ must map text to text")
    entries = {name: _check_entry(file, name, entry) for name, entry in header.items()}
    covered = 0
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != covered:
            problem = "overlaps the one before it" if begin < covered else "leaves a hole before it"
            raise CorruptFileError(
                f"{file.name}: corrupt safetensors file: tensor {clip(name)} at offset {begin} {problem}, "
                f"which ends at {covered}"
            )
        covered = end
    if base + covered != file.size:
        raise CorruptFileError(
            f"{file.name}: corrupt safetensors file: the tensors end at byte {base + covered}, but the file has "
            f"{file.size} bytes" + ("; it is incomplete" if base + covered > file.size else "")
        )
    tensors = {
        name: TensorView(name, shape, dtype, file.view(base + begin, end - begin), file.name)
        for name, (dtype, shape, begin, end) in entries.items()
    }
    return tensors, metadata


def _read_index(path: Path) -> dict[str, str]:
    """tensor -> file name within the same directory."""
    file = map_file(path)
    index = _parse_json(file.buffer[: file.size], f"{path.name}: the file")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"{path.name}: weight_map: must map tensors to files")
    for name, shard in weight_map.items():
        # A name with a separator could point anywhere on the machine.
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise CorruptFileError(f"{path.name}: weight_map: tensor {clip(name)}: {clip(shard)} is not a file name")
    return weight_map


def read_safetensors(directory: Path, progress: Progress | None = None) -> Checkpoint:
    """Open all weights in a directory: what the index says, else model.safetensors, else the only such file.

    Raises ModelNotFoundError naming missing files, CorruptFileError naming file and tensor.
    """
    if (directory / INDEX).is_file():
        return _read_sharded(directory, _read_index(directory / INDEX), progress)
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if SINGLE not in found and len(found) != 1:
        problem = f"{len(found)} safetensors files but no {INDEX}" if found else "no safetensors weights"
        raise ModelNotFoundError(f"{directory}: {problem}")
    chosen = SINGLE if SINGLE in found else found[0]
    tensors, metadata = read_file(directory / chosen)
    return Checkpoint("safetensors", tensors, dict(metadata), _note_strays(found, {chosen}))


def _note_strays(found: list[str], used: set[str]) -> list[str]:
    strays = [name for name in found if name not in used]
    if not strays:
        return []
    listed = ", ".join(clip(name) for name in strays[:3]) + (", …" if len(strays) > 3 else "")
    return [f"ignored weight files that the index does not name: {listed}"]


def _read_sharded(directory: Path, weight_map: dict[str, str], progress: Progress | None) -> Checkpoint:
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        listed = ", ".join(clip(name) for name in missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelNotFoundError(
            f"{directory}: incomplete model: {len(missing)} of {len(shards)} weight files are missing: {listed}"
        )
    tensors: dict[str, TensorView] = {}
    num_ignored = 0
    for number, shard in enumerate(shards):
        if progress is not None:
            progress("Opening weights", number, len(shards))
        held, _ = read_file(directory / shard)
        kept = {name: view for name, view in held.items() if weight_map.get(name) == shard}
        num_ignored += len(held) - len(kept)
        tensors.update(kept)
    lost = next((name for name in weight_map if name not in tensors), None)
    if lost is not None:
        raise CorruptFileError(f"{weight_map[lost]}: tensor {clip(lost)} is missing, though {INDEX} says it is there")
    notes = _note_strays(sorted(path.name for path in directory.glob("*.safetensors")), set(shards))
    if num_ignored:
        notes.append(f"ignored {num_ignored} tensors that the index does not place where they are")
    return Checkpoint("safetensors", tensors, {}, notes)
