"""Text as it grows: bytes of tokens to whole characters, and the search for stop strings."""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one token after another; all texts together equal `Tokenizer.decode` of all tokens.

    Bytes that may still become a character are held back until they do, or until `flush`. Constant time
    per token. `at_start`: nothing precedes the text, so it loses the leading space that a SentencePiece
    vocabulary adds to its first word.
    """

    __slots__ = ("_hidden", "_pending", "_strip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, at_start: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._strip = at_start and tokenizer.strips_leading_space
        self._pending = b""

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        if token_id in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character that never became whole."""
        data, self._pending = self._pending, b""
        return data.decode("utf-8", "replace")


class _Needle:
    """One stop string and how much of it the text so far ends with (Knuth, Morris and Pratt, 1977)."""

    __slots__ = ("_borders", "matched", "word")

    def __init__(self, word: str) -> None:
        self.word = word
        self.matched = 0  # characters of `word` that the text ends with
        self._borders = [0, 0]  # [k]: longest proper prefix of word[:k] that also ends it; grown as needed

    def advance(self, text: str, stop_at_match: bool) -> int | None:
        """Reads `text`. Returns the index after the first complete match, where that is asked for."""
        word, matched = self.word, self.matched
        start = 0 if matched else text.find(word[0])
        if start < 0:
            return None
        for i in range(start, len(text)):
            char = text[i]
            while matched and word[matched] != char:
                matched = self._border(matched)
            if word[matched] == char:
                matched += 1
                if matched == len(word):
                    matched = self._border(matched)
                    if stop_at_match:
                        self.matched = matched
                        return i + 1
        self.matched = matched
        return None

    def _border(self, k: int) -> int:
        borders, word = self._borders, self.word
        while len(borders) <= k:
            char = word[len(borders) - 1]
            border = borders[-1]
            while border and word[border] != char:
                border = borders[border]
            borders.append(border + 1 if word[border] == char else border)
        return borders[k]


class StopScanner:
    """Finds stop strings in growing text, holding back only what could still become one.

    Among the matches that one `push` completes the leftmost wins, then the shorter. Time is linear in
    the text and the number of stop strings, whatever their length.
    """

    __slots__ = ("_held", "_needles")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._needles = [_Needle(stop) for stop in dict.fromkeys(stops)]
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Reads `text`: (text that is safe to show, stop string found).

        With `armed` False a match completed now is ordinary text (`min_tokens`). After a match the text
        stops just before it and the scanner is done.
        """
        held = self._held
        best: tuple[int, int, str] | None = None
        for needle in self._needles:
            end = needle.advance(text, armed)
            if end is not None:
                end += len(held)
                match = (end - len(needle.word), end, needle.word)
                best = match if best is None or match < best else best
        buffer = held + text
        if best is not None:
            self._held = ""
            return buffer[: best[0]], best[2]
        num_held = max((needle.matched for needle in self._needles), default=0)
        cut = len(buffer) - num_held
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The text still held back, when no more follows."""
        held, self._held = self._held, ""
        return held
