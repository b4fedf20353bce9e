"""safetensors files and directories: the format's rules, and that the index decides."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import CorruptFileError, ModelError, ModelNotFoundError, UnsupportedError
from octavo.weights.safetensors import INDEX, read_file, read_safetensors


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: object, begin: object, end: object) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, values in tensors.items():
        raw = values.astype("<f4").tobytes()
        header[name] = entry("F32", list(values.shape), len(data), len(data) + len(raw))
        data += raw
    raw_file(path, header, data)


def test_the_safetensors_package_agrees(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    tensors = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.arange(4, dtype=np.float16),
        "ids": np.arange(3, dtype=np.int64),
        "scalar": np.array(7, np.float32),
        "empty": np.empty((0, 4), np.float32),
    }
    package.save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    views, metadata = read_file(tmp_path / "m.safetensors")
    assert metadata == {"format": "pt"}
    formats = {"w": "F32", "half": "F16", "ids": "I64", "scalar": "F32", "empty": "F32"}
    assert {name: view.format for name, view in views.items()} == formats
    for name, values in tensors.items():
        assert views[name].shape == values.shape
        assert views[name].data.tobytes() == values.tobytes()


CORRUPT = [
    ({"t": entry("F32", [2], 8, 0)}, 8, "tensor 't'"),
    ({"a": entry("F32", [2], 0, 8), "t": entry("F32", [2], 4, 12)}, 12, "overlaps"),
    ({"a": entry("F32", [2], 0, 8), "t": entry("F32", [2], 0, 8)}, 8, "overlaps"),
    ({"a": entry("F32", [2], 0, 8), "t": entry("F32", [2], 12, 20)}, 20, "hole"),
    ({"t": entry("F32", [2], 4, 12)}, 12, "hole"),
    ({"t": entry("F32", [3], 0, 8)}, 8, "takes 12 bytes"),
    ({"t": entry("F32", [-2], 0, 8)}, 8, "not a list of sizes"),
    ({"t": entry("F32", [2**63], 0, 8)}, 8, "not a list of sizes"),
    ({"t": entry("F32", [2**62, 2**62], 0, 8)}, 8, "takes"),
    ({"t": entry("F32", [True, 2], 0, 8)}, 8, "not a list of sizes"),
    ({"t": entry("F32", [2.0], 0, 8)}, 8, "not a list of sizes"),
    ({"t": entry("F32", [2], 0.0, 8)}, 8, "not two positions"),
    ({"t": entry("F32", [2], -8, 0)}, 8, "not two positions"),
    ({"t": entry("F32", [2], 0, 8)}, 9, "end at byte"),
    ({"t": entry("F32", [2], 0, 8)}, 7, "incomplete"),
    ({"t": {"dtype": "F32", "shape": [2]}}, 8, "must have dtype"),
    ({"t": 5}, 0, "must have dtype"),
    ({"__metadata__": {"x": 1}}, 0, "__metadata__"),
    (b'{"a": {}, "a": {}}', 0, "given twice"),
    (b'{"a": ' + b"[" * 100_000, 0, "not valid JSON"),
    (b'{"a": ' + b"9" * 10_000 + b"}", 0, "JSON|must have dtype"),
    (b'{"\xff": 1}', 0, "not valid JSON"),
    (b" {}", 0, "does not start"),
    (b"[]", 0, "does not start"),
    (b"{", 0, "not valid JSON"),
]


@pytest.mark.parametrize(("header", "num_bytes", "message"), CORRUPT)
def test_broken_rules_are_named(tmp_path: Path, header: object, num_bytes: int, message: str) -> None:
    path = raw_file(tmp_path / "m.safetensors", header, bytes(num_bytes))
    with pytest.raises(CorruptFileError, match=message) as caught:
        read_file(path)
    assert str(caught.value).startswith("m.safetensors: ")
    assert len(str(caught.value)) < 300


def test_unknown_dtype_is_unsupported_not_corrupt(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "m.safetensors", {"t": entry("F4", [2], 0, 1)}, bytes(1))
    with pytest.raises(UnsupportedError, match="tensor 't': dtype 'F4'"):
        read_file(path)


@pytest.mark.parametrize("length", [2**63, 100_000_001, 17])
def test_header_length_that_lies(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(14))
    with pytest.raises(CorruptFileError, match=r"header"):
        read_file(path)


def test_truncated_by_a_megabyte(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_tensors(path, {"t": np.zeros(300_000, np.float32)})
    path.write_bytes(path.read_bytes()[: -1 << 20])
    with pytest.raises(CorruptFileError, match="incomplete"):
        read_file(path)


# --- directories -----------------------------------------------------------------------------------------------------


def write_shards(directory: Path) -> None:
    for number, name in enumerate("abc", 1):
        write_tensors(directory / f"model-{number}.safetensors", {name: np.full(2, number)})
    write_index(directory, {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"})


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def values(checkpoint: Any) -> dict[str, float]:
    return {name: float(view.data.view(np.float32)[0]) for name, view in checkpoint.tensors.items()}


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    checkpoint = read_safetensors(tmp_path)
    assert values(checkpoint) == {"a": 1, "b": 2, "c": 3}
    assert checkpoint.notes == []


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"1 of 3 weight files are missing: 'model-2\.safetensors'"):
        read_safetensors(tmp_path)


def test_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_index(tmp_path, {"a": "model-1.safetensors", "x": "model-2.safetensors"})
    with pytest.raises(CorruptFileError, match=r"model-2\.safetensors: tensor 'x' is missing"):
        read_safetensors(tmp_path)


def test_the_index_decides_over_strays_and_duplicates(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_tensors(tmp_path / "model.safetensors", {"a": np.full(2, 99), "b": np.full(2, 99)})
    write_tensors(tmp_path / "model-1.safetensors", {"a": np.full(2, 1), "c": np.full(2, 77)})
    checkpoint = read_safetensors(tmp_path)
    assert values(checkpoint) == {"a": 1, "b": 2, "c": 3}
    assert "'model.safetensors'" in checkpoint.notes[0]
    assert checkpoint.notes[1].startswith("ignored 1 tensors")


def test_one_file_without_an_index(tmp_path: Path) -> None:
    write_tensors(tmp_path / "weights.safetensors", {"a": np.full(2, 5)})
    assert values(read_safetensors(tmp_path)) == {"a": 5}
    write_tensors(tmp_path / "model.safetensors", {"a": np.full(2, 6)})
    checkpoint = read_safetensors(tmp_path)
    assert values(checkpoint) == {"a": 6}
    assert "'weights.safetensors'" in checkpoint.notes[0]


def test_several_files_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no safetensors weights"):
        read_safetensors(tmp_path)
    write_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ModelNotFoundError, match="3 safetensors files but no"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "", 5, None])
def test_the_index_stays_in_its_directory(tmp_path: Path, shard: object) -> None:
    write_index(tmp_path, {"a": shard})
    with pytest.raises(CorruptFileError, match="is not a file name"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "{"])
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match=r"index\.json"):
        read_safetensors(tmp_path)
