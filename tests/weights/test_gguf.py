"""GGUF files: what is read, and which line says what is wrong with a bad one."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from support.gguf_writer import (
    ALL_FORMATS,
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I64,
    STRING,
    U8,
    U64,
    GgufFile,
    Tensor,
    Typed,
    float_tensor,
    pair,
    quantised_tensor,
    string,
)

from octavo.errors import CorruptFileError, ModelError, ModelNotFoundError, UnsupportedError
from octavo.weights.gguf import read_gguf


def small() -> GgufFile:
    return GgufFile(
        {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a", "ü", ""]},
        [float_tensor("a", np.arange(6).reshape(2, 3)), float_tensor("b", np.arange(4))],
    )


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_type(tmp_path: Path, version: int) -> None:
    values = {
        "text": "ü",
        "yes": True,
        "u8": Typed(U8, 255),
        "i8": Typed(I8, -128),
        "u64": Typed(U64, 2**64 - 1),
        "i64": Typed(I64, -(2**63)),
        "f32": Typed(F32, 0.5),
        "f64": Typed(F64, 0.1),
        "bytes": Typed(ARRAY, [1, 2, 255], U8),
        "flags": Typed(ARRAY, [True, False], BOOL),
        "floats": Typed(ARRAY, [0.25, -1.5], F32),
        "texts": Typed(ARRAY, ["", "x" * 1000], STRING),
        "none": Typed(ARRAY, [], STRING),
    }
    path = GgufFile(values, version=version).write(tmp_path / "m.gguf")
    assert read_gguf(path).metadata == {
        **{"text": "ü", "yes": True, "u8": 255, "i8": -128, "u64": 2**64 - 1, "i64": -(2**63), "f32": 0.5, "f64": 0.1},
        **{"bytes": [1, 2, 255], "flags": [True, False], "floats": [0.25, -1.5], "texts": ["", "x" * 1000], "none": []},
    }


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_tensors_of_every_format(tmp_path: Path, alignment: int) -> None:
    rng = np.random.default_rng(0)
    written = [quantised_tensor(form.name, (3, 2 * form.block_len), form, rng) for form in ALL_FORMATS]
    path = GgufFile({"general.alignment": alignment}, written).write(tmp_path / "m.gguf")
    tensors = read_gguf(path).tensors
    assert list(tensors) == [tensor.name for tensor in written]
    for tensor in written:
        view = tensors[tensor.name]
        assert (view.format, view.shape, view.source) == (tensor.name, tensor.shape, "m.gguf")
        assert view.data.tobytes() == tensor.data
        assert not view.data.flags.writeable


def test_the_gguf_package_agrees(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("llama.x", 1.5)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("w", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = read_gguf(tmp_path / "m.gguf")
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert checkpoint.tensors["w"].shape == (3, 4)
    assert checkpoint.tensors["w"].data.tobytes() == values.tobytes()


HEADERS = [
    (b"GGML" + bytes(60), UnsupportedError, "old GGML"),
    (b"lmgg" + bytes(60), UnsupportedError, "old GGML"),
    (b"<!DOCTYPE html><html>", CorruptFileError, "not a GGUF file"),
    (b"", CorruptFileError, "the file is empty"),
    (b"GG", CorruptFileError, "not a GGUF file"),
    (b"GGUF", CorruptFileError, "header"),
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), UnsupportedError, "version 1 is not supported"),
    (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), UnsupportedError, "version 4 is not supported"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedError, "big-endian"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), CorruptFileError, "1099511627776 tensors cannot fit"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), CorruptFileError, "metadata keys cannot fit"),
]


@pytest.mark.parametrize(("content", "error", "message"), HEADERS)
def test_headers(tmp_path: Path, content: bytes, error: type[ModelError], message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        read_gguf(path)
    assert "m.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="directory"):
        read_gguf(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no such file"):
        read_gguf(tmp_path / "none.gguf")
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    with pytest.raises(ModelError, match=r"loop\.gguf"):
        read_gguf(loop)
    os.mkfifo(tmp_path / "fifo.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        read_gguf(tmp_path / "fifo.gguf")
    (tmp_path / "m.gguf.part1of2").write_bytes(small().to_bytes()[:50])
    with pytest.raises(CorruptFileError, match="incomplete file"):
        read_gguf(tmp_path / "m.gguf.part1of2")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = small().write(tmp_path / "m.gguf")
    path.chmod(0)
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(path)


def raw_pair(key: str, kind: int, body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(key) + struct.pack("<I", kind) + body


RAW_PAIRS = [
    (raw_pair("k", STRING, struct.pack("<Q", 1 << 60)), "key 'k'"),
    (raw_pair("k", ARRAY, struct.pack("<IQ", U8, 1 << 60)), "items cannot fit"),
    (raw_pair("k", ARRAY, struct.pack("<IQ", U64, 1 << 61) + bytes(64)), "items cannot fit"),
    (raw_pair("k", ARRAY, struct.pack("<IQ", STRING, 1 << 40)), "strings cannot fit"),
    (raw_pair("k", ARRAY, struct.pack("<IQ", STRING, 2) + string("a") + struct.pack("<Q", 2**64 - 4)), "item 1 of 2"),
    (raw_pair("k", ARRAY, struct.pack("<IQ", STRING, 2) + string("abcdefgh") + b"\0"), "item 1 of 2"),
    (raw_pair("k", ARRAY, struct.pack("<IQ", 99, 0)), "unknown array type 99"),
    (raw_pair("k", 13, bytes(8)), "unknown value type 13"),
    (raw_pair("k" * 70_000, U8, b"\0"), "too long"),
    (raw_pair("k", STRING, string(b"\xff\xfe")), "not UTF-8"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * pair("twice", 1), "'twice': given twice"),
]


@pytest.mark.parametrize(("content", "message"), RAW_PAIRS)
def test_metadata_that_lies(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=message) as caught:
        read_gguf(path)
    assert len(str(caught.value)) < 300


def test_nested_arrays_are_not_supported(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1)))
    with pytest.raises(UnsupportedError, match="nested"):
        read_gguf(path)


BAD_TENSORS = [
    (Tensor("t", (8,), bytes(32), offset=2**64 - 32), "reach past the end"),
    (Tensor("t", (8,), bytes(32), offset=1 << 40), "reach past the end"),
    (Tensor("t", (8,), bytes(32), offset=1), "not aligned"),
    (Tensor("t", (2**63, 2**63), bytes(32)), "reach past the end"),
    (Tensor("t", (9,), bytes(32)), "reach past the end"),
    (Tensor("t", (1,) * 9, bytes(32)), "9 dimensions"),
    (Tensor("t", (), bytes(32)), "0 dimensions"),
    (Tensor("t", (0, 4), bytes(32)), "empty dimension"),
    (Tensor("t", (1, 33), bytes(64), type_id=2), "multiple of 32"),
    (Tensor("first", (8,), bytes(32)), "described twice"),
    (Tensor("t", (8,), b"", offset=0), "overlaps"),
    (Tensor("t" * 70_000, (8,), bytes(32)), "too long"),
]


@pytest.mark.parametrize(("tensor", "message"), BAD_TENSORS)
def test_tensors_that_lie(tmp_path: Path, tensor: Tensor, message: str) -> None:
    path = GgufFile({}, [Tensor("first", (8,), bytes(32)), tensor]).write(tmp_path / "m.gguf")
    with pytest.raises(CorruptFileError, match=message) as caught:
        read_gguf(path)
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize("alignment", [0, 3, 1 << 30, "8"])
def test_alignment_must_be_a_power_of_two(tmp_path: Path, alignment: object) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("general.alignment", alignment))
    with pytest.raises(CorruptFileError, match=r"general\.alignment"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("type_id", "name"), [(39, "type 39 (MXFP4)"), (200, "type 200"), (1 << 31, "type 2147483648"), (4, "type 4")]
)
def test_unknown_types_are_kept_by_name(tmp_path: Path, type_id: int, name: str) -> None:
    """Whether the tensor is needed at all is for the loader to say (see test_loading)."""
    path = GgufFile({}, [Tensor("t", (8,), bytes(32), type_id)]).write(tmp_path / "m.gguf")
    view = read_gguf(path).tensors["t"]
    assert view.format == name
    assert view.data.size == 0


# --- split models ----------------------------------------------------------------------------------------------------


def write_parts(directory: Path, count: int = 3, total: int | None = None, names: str = "tuv") -> list[Path]:
    paths = []
    for index in range(count):
        file = GgufFile(
            {"split.no": index, "split.count": count, "split.tensors.count": count if total is None else total},
            [float_tensor(names[index], np.full(4, index))],
        )
        if index == 0:
            file.metadata["general.architecture"] = "llama"
        paths.append(file.write(directory / f"m-{index + 1:05}-of-{count:05}.gguf"))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_opens_the_whole_model(tmp_path: Path, given: int) -> None:
    checkpoint = read_gguf(write_parts(tmp_path)[given])
    assert list(checkpoint.tensors) == ["t", "u", "v"]
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.notes == ["3 files"]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_missing_part_is_named(tmp_path: Path, lost: int) -> None:
    paths = write_parts(tmp_path)
    paths[lost].unlink()
    with pytest.raises(ModelNotFoundError, match=rf"m-0000{lost + 1}-of-00003\.gguf is missing"):
        read_gguf(paths[2])


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    renamed = paths[0].rename(tmp_path / "whole.gguf")
    with pytest.raises(CorruptFileError, match="one of 3 parts"):
        read_gguf(renamed)
    paths = write_parts(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CorruptFileError, match=r"m-00002-of-00003\.gguf: does not say that it is part 2 of 3"):
        read_gguf(paths[0])
    paths = write_parts(tmp_path, total=5)
    with pytest.raises(CorruptFileError, match=r"split\.tensors\.count"):
        read_gguf(paths[0])
    paths = write_parts(tmp_path, names="tut")
    with pytest.raises(CorruptFileError, match="is also in"):
        read_gguf(paths[0])
