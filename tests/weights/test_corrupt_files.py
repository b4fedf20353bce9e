"""Files cut or changed anywhere: an Octavo error or a sound result, never a crash or a huge allocation."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gguf_writer import GgufFile, float_tensor, model_file
from support.tiny_models import TINY_SIZES, random_tensors, tiny_spec

from octavo.errors import CorruptFileError, OctavoError
from octavo.models.loading import load_model
from octavo.weights.files import ModelFiles
from octavo.weights.gguf import read_gguf
from octavo.weights.safetensors import read_file

SMALL = GgufFile(
    {"general.architecture": "llama", "llama.block_count": 1, "tokenizer.ggml.tokens": ["a", "bc", "ü"], "x": [1, 2]},
    [float_tensor("token_embd.weight", np.arange(12).reshape(3, 4)), float_tensor("b", np.arange(5))],
).to_bytes()

SPEC = tiny_spec(num_hidden_layers=1, vocab_size=8)
MODEL = model_file("llama", random_tensors(SPEC), {**TINY_SIZES, "num_layers": 1}).to_bytes()
HEADER_BYTES = MODEL.rindex(b"output.weight") + 60  # where the tensor descriptions end, about


def complaint(attempt: Callable[[], object]) -> str:
    """The message of the Octavo error that an attempt raises, "" if it succeeds. Anything else is a crash."""
    try:
        attempt()
    except OctavoError as error:
        return str(error)
    return ""


def safetensors_bytes() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "empty": {"dtype": "F16", "shape": [0], "data_offsets": [24, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(26)


READERS: list[tuple[str, bytes, Callable[[Path], object]]] = [
    ("m.gguf", SMALL, read_gguf),
    ("m.safetensors", safetensors_bytes(), read_file),
]


@pytest.mark.parametrize(("name", "content", "read"), READERS, ids=["gguf", "safetensors"])
def test_every_truncation_is_refused(tmp_path: Path, name: str, content: bytes, read: Callable[[Path], object]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    read(path)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CorruptFileError) as caught:
            read(path)
        assert name in str(caught.value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("name", "content", "read"), READERS, ids=["gguf", "safetensors"])
def test_every_byte_may_change(tmp_path: Path, name: str, content: bytes, read: Callable[[Path], object]) -> None:
    path = tmp_path / name
    tracemalloc.start()
    for position in range(len(content)):
        for value in (0x00, 0xFF, content[position] ^ 1, content[position] ^ 0x80):
            path.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
            assert "\n" not in complaint(lambda: read(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(st.integers(0, HEADER_BYTES), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4
    ),
    length=st.none() | st.integers(0, len(MODEL)),
)
def test_a_changed_model_loads_or_is_refused(
    tmp_path: Path, changes: list[tuple[int, bytes]], length: int | None
) -> None:
    content = bytearray(MODEL)
    for position, patch in changes:
        content[position : position + len(patch)] = patch
    path = tmp_path / "m.gguf"
    path.write_bytes(content[:length])
    message = complaint(lambda: load_model(ModelFiles("m", path)))
    assert "\n" not in message
    assert len(message) < 600


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_random_safetensors_headers(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "\n" not in complaint(lambda: read_file(path))
