"""Tokenizers from GGUF metadata."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import CHATML, PIECES, byte_level, sentencepiece

from octavo.errors import CorruptFileError, RequestError, UnsupportedError
from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizer_gguf import _PRE_TOKENIZERS

BYTE_LEVEL = Tokenizer.from_gguf(byte_level())
SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece())


def pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, **options)]


@given(st.text())
def test_byte_level_round_trip(text: str) -> None:
    for parse_special in (True, False):
        ids = BYTE_LEVEL.encode(text, parse_special=parse_special)
        assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)), st.booleans())
def test_byte_level_decode_equals_the_library(ids: list[int], skip: bool) -> None:
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=skip) == BYTE_LEVEL._backend.decode(ids, skip_special_tokens=skip)


@given(st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_sentencepiece_round_trip_and_library(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, parse_special=False)
    assert SENTENCEPIECE.decode(ids) == text == SENTENCEPIECE._backend.decode(ids)


def naive_sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """Joins the adjacent pair of the highest score, leftmost first, until none is left; then bytes."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        i = min(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    known = [[s] if s in scores else [f"<0x{b:02X}>" for b in s.encode()] for s in symbols]
    return [s for part in known for s in part]


@given(st.text(alphabet="aabhelo wrd世é😀."))
def test_sentencepiece_equals_a_naive_implementation(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    tokens = sentencepiece()["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in ids] == naive_sentencepiece(text, dict(PIECES))


@pytest.mark.parametrize(
    ("pre", "text", "cuts"),
    [
        ("smollm", "ab 12!x", ["ab", " ", "1", "2", "!", "x"]),
        ("gpt-2", "ab 12!x\n\n y", ["ab", " 12", "!", "x", "\n\n", " y"]),
        ("default", "IT'S it's", ["IT", "'", "S", " it", "'s"]),
        ("llama-bpe", "IT'S 12345!\n\nx", ["IT", "'S", " ", "123", "45", "!\n\n", "x"]),
        ("qwen2", "IT'S 123 (a)", ["IT", "'S", " ", "1", "2", "3", " (", "a", ")"]),
        ("tekken", "CamelCase x1", ["Camel", "Case", " x", "1"]),
        ("deepseek-v3", "ab1234世界c", ["ab", "123", "4", "世界", "c"]),
        ("deepseek-coder", "ab 12\nc", ["ab", " ", "1", "2", "\n", "c"]),
    ],
)
def test_pre_tokenizers_cut_as_their_models_do(pre: str, text: str, cuts: list[str]) -> None:
    step = _PRE_TOKENIZERS[pre].build()
    assert [text[a:b] for _, (a, b) in step.pre_tokenize_str(text)] == cuts


def test_every_known_pre_tokenizer_builds() -> None:
    for pre in _PRE_TOKENIZERS:
        tokenizer = Tokenizer.from_gguf(byte_level(pre=pre))
        text = "It's 1234 words:\n\n  \tdéjà 世界 😀 x_y"
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_qwen2_composes_characters() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    assert BYTE_LEVEL.encode("e\u0301") != BYTE_LEVEL.encode("\u00e9")


@pytest.mark.parametrize(
    ("metadata", "error", "words"),
    [
        ({}, UnsupportedError, "--tokenizer"),
        (byte_level(tokens=None), UnsupportedError, "--tokenizer"),
        (byte_level(tokens=[]), UnsupportedError, "--tokenizer"),
        (byte_level(model="foo"), UnsupportedError, "'foo'"),
        (byte_level(pre="martian"), UnsupportedError, "'martian'"),
        (byte_level(pre=7), UnsupportedError, "pre"),
        (byte_level(merges=None), CorruptFileError, "--tokenizer"),
        (byte_level(merges="ab"), CorruptFileError, "not an array"),
        (byte_level(merges=["abc"]), CorruptFileError, "entry 0"),
        (byte_level(merges=["a nosuchtoken"]), CorruptFileError, "merges"),
        (byte_level(token_type=[1, 2]), CorruptFileError, "token_type"),
        (byte_level(tokens=[1, 2], token_type=None), CorruptFileError, "tokens"),
        (byte_level(bos_token_id=100000), CorruptFileError, "bos_token_id"),
        (byte_level(eos_token_id=-1), CorruptFileError, "eos_token_id"),
        (byte_level(eot_token_id=100000), CorruptFileError, "eot_token_id"),
        (sentencepiece(scores=None), CorruptFileError, "scores"),
        (sentencepiece(scores=[0.0]), CorruptFileError, "scores"),
    ],
)
def test_bad_metadata_is_named(metadata: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        Tokenizer.from_gguf(metadata)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_bos_and_eos_as_the_file_says() -> None:
    def ids(metadata: dict[str, Any]) -> list[int]:
        return Tokenizer.from_gguf(metadata).encode("")

    assert ids(byte_level(add_bos_token=None)) == []
    assert ids(byte_level(add_bos_token=None, pre="llama-bpe")) == [1]
    assert ids(byte_level(add_bos_token=True, add_eos_token=True)) == [1, 2]
    assert ids(byte_level(add_bos_token=True, bos_token_id=None)) == []
    assert ids(sentencepiece()) == [1]
    assert ids(sentencepiece(bos_token_id=None)) == [1]
    assert ids(sentencepiece(add_bos_token=False)) == []
    assert Tokenizer.from_gguf(sentencepiece()).encode("hello", add_special_tokens=False) == [
        sentencepiece()["tokenizer.ggml.tokens"].index("▁hello")
    ]


def test_tokens_that_end_an_answer() -> None:
    assert BYTE_LEVEL.eos_token_ids == {2}
    # A base model's EOS ends documents; its chat template closes turns with another token.
    assert Tokenizer.from_gguf(byte_level(eos_token_id=0)).eos_token_ids == {0, 2}
    assert Tokenizer.from_gguf(byte_level(eos_token_id=0, chat_template=None)).eos_token_ids == {0}
    assert Tokenizer.from_gguf(byte_level(eos_token_id=0, eot_token_id=1, chat_template=None)).eos_token_ids == {0, 1}
    assert Tokenizer.from_gguf(byte_level(eos_token_id=None, chat_template=None)).eos_token_ids == set()


def test_special_tokens() -> None:
    assert BYTE_LEVEL.special_ids == {0, 1, 2}
    assert BYTE_LEVEL.encode("<|im_start|>") == [1]
    plain = BYTE_LEVEL.encode("<|im_start|>", parse_special=False)
    assert not BYTE_LEVEL.special_ids.intersection(plain)
    assert BYTE_LEVEL.decode(plain) == "<|im_start|>"
    assert BYTE_LEVEL.encode("<|im_start|>") == [1]  # the plain reading left no trace
    assert BYTE_LEVEL.decode([1, *plain, 2]) == "<|im_start|>"
    assert BYTE_LEVEL.decode([1], skip_special_tokens=False) == "<|im_start|>" == BYTE_LEVEL.token_text(1)
    assert BYTE_LEVEL.chat_template == CHATML
    assert BYTE_LEVEL.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_eos_is_special_even_if_the_file_forgot() -> None:
    size = len(byte_level()["tokenizer.ggml.tokens"])
    tokenizer = Tokenizer.from_gguf(byte_level(token_type=[1] * size))
    assert tokenizer.special_ids == {1, 2}
    assert tokenizer.encode("a<|im_end|>")[-1] == 2


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"].append("<think>")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = Tokenizer.from_gguf(metadata)
    last = tokenizer.vocab_size - 1
    for parse_special in (True, False):
        assert tokenizer.encode("a<think>b", parse_special=parse_special)[1] == last
    assert tokenizer.decode([last]) == "<think>"
    assert not tokenizer.is_special(last)


def test_ids_without_text() -> None:
    assert BYTE_LEVEL.decode([BYTE_LEVEL.vocab_size + 5]) == ""
    assert BYTE_LEVEL.token_bytes(10**9) == b""
    with pytest.raises(RequestError):
        BYTE_LEVEL.decode([-1])


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        BYTE_LEVEL.encode("\ud83d")
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("\U0001f44b\x00")) == "\U0001f44b\x00"


@settings(max_examples=50)
@given(st.text(alphabet="ab <|>im_start\n"), st.text(alphabet="ab <|>im_start\n"))
def test_literals_keep_text_and_never_become_special(left: str, right: str) -> None:
    text = f"<|im_start|>{left}\ue000{right}<|im_end|>"
    for tokenizer in (BYTE_LEVEL, Tokenizer.from_gguf(sentencepiece(tokens=_with_chat_tokens(), eos_token_id=1))):
        start, end = tokenizer.encode("<|im_start|>", add_special_tokens=False)[0], tokenizer.token_id("<|im_end|>")
        ids = tokenizer.encode_literals(text, {"\ue000": "<|im_end|>"})
        assert ids[0] == start
        assert ids[-1] == end
        assert not set(ids[1:-1]) & {start, end}
        inner = b"".join(map(tokenizer.token_bytes, ids[1:-1])).decode()
        assert inner.removeprefix(" " if tokenizer.strips_leading_space else "") == f"{left}<|im_end|>{right}"


def _with_chat_tokens() -> list[str]:
    return ["<unk>", "<|im_start|>", "<|im_end|>", *sentencepiece()["tokenizer.ggml.tokens"][3:]]


def test_literals_agree_with_plain_encoding_when_there_are_none() -> None:
    text = "<|im_start|>user\nhello world 12<|im_end|>\n<|im_start|>assistant\n"
    assert BYTE_LEVEL.encode_literals(text, {}) == BYTE_LEVEL.encode(text)


def test_many_threads_encode_as_one() -> None:
    texts = [f"hello {i} <|im_end|> world" * 20 for i in range(200)]
    expected = [BYTE_LEVEL.encode(t, parse_special=i % 2 == 0) for i, t in enumerate(texts)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: BYTE_LEVEL.encode(texts[i], parse_special=i % 2 == 0), range(200)))
    assert found == expected
