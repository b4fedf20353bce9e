"""Tokenizers from Hugging Face directories, against the library and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text.vocabularies import CHATML, byte_level, sentencepiece
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.errors import CorruptFileError, ModelNotFoundError, UnsupportedError
from octavo.text.stream import Detokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizer_gguf import read_gguf_tokenizer


def save(directory: Path, backend: Backend, **files: Any) -> Path:
    """Writes tokenizer.json and the other files, named by keyword without .json."""
    backend.save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def byte_level_backend() -> Backend:
    return read_gguf_tokenizer(byte_level()).backend


CONFIG = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}


def test_directory_and_gguf_agree(tmp_path: Path) -> None:
    for metadata in (byte_level(), sentencepiece(add_bos_token=False)):
        ours = Tokenizer.from_gguf(metadata)
        loaded = Tokenizer.from_directory(save(tmp_path, read_gguf_tokenizer(metadata).backend))
        text = "hello  world 12 世界 😀\n"
        assert loaded.encode(text) == ours.encode(text)
        assert loaded.vocab_size == ours.vocab_size
        assert loaded.special_ids == ours.special_ids
        ids = range(ours.vocab_size)
        assert [loaded.token_bytes(i) for i in ids] == [ours.token_bytes(i) for i in ids]
        assert loaded.strips_leading_space == ours.strips_leading_space


def test_settings_of_the_directory(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), tokenizer_config=CONFIG, generation_config={"eos_token_id": [2, 7]})
    tokenizer = Tokenizer.from_directory(tmp_path / "tokenizer.json")
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2, 7}
    assert tokenizer.chat_template == CHATML
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_eos_without_generation_config(tmp_path: Path) -> None:
    config = {**CONFIG, "eos_token": "<|endoftext|>"}
    assert Tokenizer.from_directory(save(tmp_path, byte_level_backend(), tokenizer_config=config)).eos_token_ids == {
        0,
        2,
    }
    save(tmp_path, byte_level_backend(), tokenizer_config=config, generation_config={"eos_token_id": 0})
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == {0}


def test_chat_template_files(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    save(tmp_path, byte_level_backend(), tokenizer_config={"chat_template": named})
    assert Tokenizer.from_directory(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_directory(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").unlink()
    save(tmp_path, byte_level_backend(), tokenizer_config={}, chat_template={"chat_template": "C"})
    assert Tokenizer.from_directory(tmp_path).chat_template == "C"


def test_training_settings_do_not_cut_or_pad(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    ids = Tokenizer.from_directory(save(tmp_path, backend)).encode("hello world hello")
    assert ids == Tokenizer.from_gguf(byte_level()).encode("hello world hello")


def test_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="--tokenizer"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"spm")
    with pytest.raises(UnsupportedError, match=r"tokenizer\.model"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(CorruptFileError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    save(tmp_path, byte_level_backend(), generation_config={"eos_token_id": 10**9})
    with pytest.raises(CorruptFileError, match="eos_token_id"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CorruptFileError, match="generation_config"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    backend = byte_level_backend()
    backend.decoder = decoders.CTC()
    with pytest.raises(UnsupportedError, match="CTC"):
        Tokenizer.from_directory(save(tmp_path, backend))


def metaspace_backend() -> Backend:
    pieces = ["<s>", "</s>", "▁a", "▁b", "a", "b", "▁", "c"]
    backend = Backend(models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("▁", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in pieces[:2]])
    return backend


def words_backend() -> Backend:
    backend = Backend(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(ids=st.lists(st.integers(0, 7)), skip=st.booleans())
@pytest.mark.parametrize("make", [metaspace_backend, words_backend])
def test_other_decoders_equal_the_library(make: Any, tmp_path: Path, ids: list[int], skip: bool) -> None:
    tokenizer = Tokenizer.from_directory(save(tmp_path, make()))
    ids = [i % tokenizer.vocab_size for i in ids]
    assert tokenizer.decode(ids, skip_special_tokens=skip) == make().decode(ids, skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert "".join(map(detokenizer.push, ids)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_literals_where_only_the_first_word_gets_a_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(save(tmp_path, metaspace_backend()))
    assert tokenizer.encode("<s>a b") == [0, 4, 3]
    assert tokenizer.encode("a b") == [2, 3]
    assert tokenizer.encode_literals("<s>a b\ue000", {"\ue000": "c"}) == [0, 4, 3, 7]
    assert tokenizer.encode_literals("a b\ue000", {"\ue000": "c"}) == [2, 3, 7]


def test_added_tokens_whose_ids_leave_gaps(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend())
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    size = Tokenizer.from_directory(tmp_path).vocab_size
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    description["added_tokens"] += [
        {"id": size + 3, "content": "<tool>", "special": False, **shape},
        {"id": size + 9, "content": "<|end|>", "special": True, **shape},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = Tokenizer.from_directory(tmp_path)
    tool, end = tokenizer.token_id("<tool>"), tokenizer.token_id("<|end|>")
    assert tokenizer.encode("<tool><|end|>") == [tool, end]
    plain = tokenizer.encode("<tool><|end|>", parse_special=False)
    assert plain[0] == tool
    assert end not in plain
    assert tokenizer.decode(plain) == "<tool><|end|>"
    assert tokenizer.vocab_size > max(tool or 0, end or 0)


TEXTS = ["", " ", "Hello, world!", "a <|im_start|> b<|im_end|>", "  hello 123\n\n世界 😀", "don't\tpanic"]


def test_transformers_agrees(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    wrapped.chat_template = CHATML
    wrapped.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.chat_template == CHATML
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
