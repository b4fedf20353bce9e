"""Text to token ids and back, for every kind of tokenizer file."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import RequestError
from octavo.text.parts import PieceStyle, TokenizerParts, piece_bytes, plain_twin
from octavo.text.tokenizer_gguf import read_gguf_tokenizer
from octavo.text.tokenizer_hf import read_hf_tokenizer


def _not_unicode() -> RequestError:
    return RequestError("the text is not valid Unicode (half a surrogate pair)", param="prompt", code="invalid_value")


class Tokenizer:
    """One vocabulary. Immutable after construction and safe to use from many threads at once.

    Decoding is defined on bytes: a text is the concatenation of `token_bytes` of its tokens, decoded as
    UTF-8 with one U+FFFD per maximal invalid part. So the same definition serves whole texts and streams
    cut at any token. It equals `tokenizers` everywhere but in invalid runs of SentencePiece byte tokens,
    where that library writes one U+FFFD per byte of the whole run.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        # Nobody can guess the marker, so no text holds it.
        self._marker = f"\uf8fd{secrets.token_hex(8)}\uf8fd"
        self._plain, self._marker_id = plain_twin(parts.backend, parts.special_ids, self._marker)
        self._bytes: list[bytes | None] = [None] * parts.vocab_size
        self.vocab_size: int = parts.vocab_size
        self.bos_token_id: int | None = parts.bos_token_id
        self.eos_token_ids: frozenset[int] = parts.eos_token_ids
        self.special_ids: frozenset[int] = parts.special_ids
        self.chat_template: str | None = parts.chat_template
        self.special_tokens: dict[str, str] = dict(parts.special_tokens)  # "bos_token": "<s>", ... for templates
        self.strips_leading_space: bool = parts.strips_leading_space
        texts = sorted({t for i in parts.special_ids if (t := parts.piece(i))}, key=len, reverse=True)
        self.special_text_pattern: re.Pattern[str] | None = (
            re.compile("|".join(map(re.escape, texts))) if texts else None
        )

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file, as {key: value}. UnsupportedError, CorruptFileError."""
        return cls(read_gguf_tokenizer(metadata))

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """From a directory with tokenizer.json. ModelNotFoundError, UnsupportedError, CorruptFileError."""
        return cls(read_hf_tokenizer(Path(path)))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`; RequestError where it is not valid Unicode.

        `add_special_tokens` adds BOS and EOS where the model wants them. `parse_special=False` reads the
        text of special tokens as ordinary text.
        """
        backend = self._backend if parse_special else self._plain
        try:
            # The batch call is the one that releases the interpreter lock.
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeError):
            raise _not_unicode() from None
        if add_special_tokens:
            if self._parts.add_bos and self.bos_token_id is not None:
                ids.insert(0, self.bos_token_id)
            if self._parts.add_eos and self._parts.eos_token_id is not None:
                ids.append(self._parts.eos_token_id)
        return ids

    def encode_literals(self, text: str, literals: Mapping[str, str]) -> list[int]:
        """Token ids of a text in which each placeholder (one character) stands for plain text.

        Special tokens are looked for while the placeholders are in place; then the text between them,
        with the placeholders replaced, is tokenised as ordinary text. Adds no BOS or EOS.
        """
        try:
            encoding = self._backend.encode_batch([text], add_special_tokens=False)[0]
        except (TypeError, UnicodeError):
            raise _not_unicode() from None
        restore = str.maketrans(dict(literals))
        ids: list[int] = []
        start = 0
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # An unknown character gives the special token <unk> too, but does not read "<unk>".
            if token_id in self.special_ids and text[begin:end].strip() == (self._parts.piece(token_id) or "").strip():
                ids += self._encode_segment(text[start:begin].translate(restore), first=not ids)
                ids.append(token_id)
                start = end
        return ids + self._encode_segment(text[start:].translate(restore), first=not ids)

    def _encode_segment(self, text: str, *, first: bool) -> list[int]:
        """Ordinary text at the very start or after a special token: some kinds treat the two differently."""
        if not text:
            return []
        if first:
            return self.encode(text, add_special_tokens=False, parse_special=False)
        ids = self.encode(self._marker + text, add_special_tokens=False, parse_special=False)
        assert ids[0] == self._marker_id
        return ids[1:]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Ids beyond the vocabulary have no text (models pad it); RequestError below 0."""
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join([self.token_bytes(i) for i in token_ids if i not in hidden])
        if self.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; they need not be whole characters. Special tokens: their text."""
        if token_id < 0:
            raise RequestError(f"token id {token_id} is negative", param="token_ids", code="invalid_value")
        if token_id >= self.vocab_size:
            return b""
        data = self._bytes[token_id]
        if data is None:
            data = self._bytes[token_id] = self._read_bytes(token_id)
        return data

    def _read_bytes(self, token_id: int) -> bytes:
        piece = self._parts.piece(token_id)
        if piece is None:
            return b""
        if token_id in self._parts.literal_ids and self._parts.style is PieceStyle.BYTE_LEVEL:
            return piece.encode("utf-8", "replace")
        return piece_bytes(piece, self._parts.style)

    def stored_piece(self, token_id: int) -> str:
        """How the vocabulary spells the token, for example "Ġthe" or "▁the"; "" where it has none."""
        return self._parts.piece(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def token_id(self, text: str) -> int | None:
        """Id of the token stored as `text`, for example "<|im_end|>"."""
        found: int | None = self._backend.token_to_id(text)
        return found
