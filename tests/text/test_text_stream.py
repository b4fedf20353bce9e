"""Incremental decoding and the stop-string scanner, against naive references."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import byte_level, sentencepiece

from octavo.text.parts import _BYTE_OF_CODE
from octavo.text.stream import Detokenizer, StopScanner
from octavo.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer.from_gguf(byte_level())
SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece())
TOKENIZERS = (BYTE_LEVEL, SENTENCEPIECE)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True, at_start: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, at_start=at_start)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@settings(max_examples=300)
@given(st.sampled_from(TOKENIZERS), st.data(), st.booleans())
def test_any_tokens_streamed_equal_the_whole(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.binary(), st.sampled_from(TOKENIZERS))
def test_bytes_streamed_one_by_one_equal_the_whole(data: bytes, tokenizer: Tokenizer) -> None:
    byte_ids = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    if tokenizer is SENTENCEPIECE:
        byte_ids = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    ids = [byte_ids[bytes([b])] for b in data]
    expected = data.decode("utf-8", "replace")
    assert "".join(stream(tokenizer, ids, at_start=False)) == expected


@given(st.text(), st.data())
def test_nothing_is_shown_before_its_characters_are_whole(text: str, data: st.DataObject) -> None:
    byte_ids = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size)}
    detokenizer = Detokenizer(BYTE_LEVEL)
    raw = text.encode()
    shown = ""
    for i in range(len(raw)):
        shown += detokenizer.push(byte_ids[raw[i : i + 1]])
        assert shown == raw[: i + 1].decode("utf-8", "ignore")
    assert detokenizer.flush() == ""


def test_a_token_may_hold_the_end_of_one_character_and_the_whole_next() -> None:
    alphabet = {byte: chr(code) for code, byte in _BYTE_OF_CODE.items()}
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"].append("".join(alphabet[b] for b in b"\xbd\xe4\xb8\x96"))
    metadata["tokenizer.ggml.token_type"].append(1)
    tokenizer = Tokenizer.from_gguf(metadata)
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [byte_ids[b"\xe5"], byte_ids[b"\xa5"], tokenizer.vocab_size - 1]
    assert stream(tokenizer, ids) == ["", "", "好世", ""]
    assert tokenizer.decode(ids) == "好世"
    assert tokenizer.token_text(ids[-1]) == "\ufffd世"
    assert b"".join(map(tokenizer.token_bytes, ids)) == "好世".encode()


def test_a_cut_character_becomes_one_replacement() -> None:
    for tokenizer in TOKENIZERS:
        byte_ids = {tokenizer.token_bytes(i): i for i in range(3, 259)}
        ids = [byte_ids[b"a"], byte_ids[b"\xf0"], byte_ids[b"\x9f"]]
        assert stream(tokenizer, ids) == ["a", "", "", "\ufffd"]
        assert tokenizer.decode(ids) == "a\ufffd"


def test_sentencepiece_space_depends_on_what_precedes() -> None:
    ids = SENTENCEPIECE.encode("hello world", add_special_tokens=False)
    assert "".join(stream(SENTENCEPIECE, ids)) == "hello world"
    assert "".join(stream(SENTENCEPIECE, ids, at_start=False)) == " hello world"
    assert "".join(stream(SENTENCEPIECE, [1, *ids], skip=False)) == "<s> hello world"


def naive_push(before: str, text: str, stops: list[str], armed: bool) -> tuple[int, int, str] | None:
    """Of all occurrences that end in `text`: the first of each stop string, then the leftmost, then the shortest."""
    whole = before + text
    matches = []
    for stop in stops:
        ends = [e for e in range(len(before) + 1, len(whole) + 1) if e >= len(stop) and whole[:e].endswith(stop)]
        if ends:
            matches.append((ends[0] - len(stop), ends[0], stop))
    return min(matches) if matches and armed else None


words = st.text(alphabet="ab", max_size=5)


@settings(max_examples=500)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.tuples(words, st.booleans()), max_size=12),
)
def test_scanner_equals_a_naive_search(stops: list[str], pushes: list[tuple[str, bool]]) -> None:
    scanner = StopScanner(tuple(stops))
    before = shown = ""
    for text, armed in pushes:
        piece, found = scanner.push(text, armed=armed)
        shown += piece
        match = naive_push(before, text, stops, armed)
        before += text
        assert found == (match[2] if match else None)
        if match:
            assert shown == before[: match[0]]
            return
        # Held back: exactly the longest end of the text that is the start of a stop string.
        prefixes = {stop[:k] for stop in stops for k in range(len(stop))}
        held = next(k for k in range(len(before), -1, -1) if before[len(before) - k :] in prefixes)
        assert shown == before[: len(before) - held]
    assert shown + scanner.flush() == before


def test_scanner_takes_long_stop_strings_in_stride() -> None:
    stop = "a" * 100_000 + "b"
    scanner = StopScanner((stop,))
    for _ in range(200):
        assert scanner.push("a" * 100) == ("", None)
    assert scanner.push("c") == ("a" * 20_000 + "c", None)
