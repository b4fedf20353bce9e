"""What a tokenizer is made of once it is read, whatever file it came from."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend


class PieceStyle(enum.Enum):
    """How the stored text of an ordinary token becomes bytes."""

    BYTE_LEVEL = "byte-level"  # each character stands for one byte (GPT-2)
    SENTENCEPIECE = "sentencepiece"  # U+2581 stands for a space, <0xNN> for a byte
    WORDS = "words"  # no decoder: tokens are words, joined with spaces


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """A tokenizer as read from a file.

    `piece(i)` is the stored text of token i, None where there is none. `literal_ids` are tokens whose
    stored text is their text (added and special tokens). `eos_token_id` ends documents, `eos_token_ids`
    are all tokens that end an answer. `add_bos` and
    `add_eos` say what `encode` adds itself; False where the backend's post-processor does it.
    `strips_leading_space`: a text decoded from its start loses one leading space.
    """

    backend: Backend
    style: PieceStyle
    piece: Callable[[int], str | None]
    vocab_size: int
    special_ids: frozenset[int]
    literal_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_id: int | None
    eos_token_ids: frozenset[int]
    add_bos: bool = False
    add_eos: bool = False
    strips_leading_space: bool = False
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)


# Tokens that close a turn of a chat. Files often name only the end of a document as EOS.
TURN_CLOSERS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<EOT>", "<|end_of_turn|>")


def turn_closer_ids(chat_template: str | None, find: Callable[[str], int | None]) -> set[int]:
    """Ids of the end-of-turn tokens that the chat template writes."""
    if not chat_template:
        return set()
    ids = (find(text) for text in TURN_CLOSERS if text in chat_template)
    return {i for i in ids if i is not None}


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte of GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other
    bytes take U+0100, U+0101, ... in order (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {b: b for b in printable} | {0x100 + i: b for i, b in enumerate(others)}


_BYTE_OF_CODE = _byte_alphabet()
# Maps the alphabet to Latin-1, whose encoding then gives the bytes; everything else to a character that Latin-1 lacks.
_TO_LATIN1 = {c: chr(b) for c, b in _BYTE_OF_CODE.items()}
_TO_LATIN1.update({b: "\uffff" for b in range(256) if b not in _BYTE_OF_CODE})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def piece_bytes(piece: str, style: PieceStyle) -> bytes:
    """Bytes of the ordinary token stored as `piece`.

    A byte-level piece with a character outside the alphabet stands for itself, as in `tokenizers`.
    """
    if style is PieceStyle.BYTE_LEVEL:
        try:
            return piece.translate(_TO_LATIN1).encode("latin-1")
        except UnicodeEncodeError:
            return piece.encode("utf-8", "replace")
    if style is PieceStyle.WORDS:
        return b" " + piece.encode("utf-8", "replace")
    if byte := _BYTE_TOKEN.match(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace("\u2581", " ").encode("utf-8", "replace")


def plain_twin(backend: Backend, special_ids: frozenset[int], marker: str) -> tuple[Backend, int]:
    """A tokenizer that shares the model of `backend` but reads special tokens as plain text.

    Also returns the id of `marker`, an added token of the twin alone: what follows it is tokenised as
    text after a special token is. Two tokenizers, because the switch of `tokenizers` is mutable state
    that threads would fight over.
    """
    added = sorted(backend.get_added_tokens_decoder().items())
    twin = Backend(backend.model)
    # The stubs do not say that these four may be None, which is what "none" looks like.
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (component := getattr(backend, name)) is not None:
            setattr(twin, name, component)
    twin.add_tokens([_as_special(token, token_id in special_ids) for token_id, token in added])
    moved = any(token_id not in special_ids and twin.token_to_id(t.content) != token_id for token_id, t in added)
    if moved:  # ids with gaps: only the full description keeps them
        twin = Backend.from_str(backend.to_str())
    twin.encode_special_tokens = True
    twin.add_tokens([AddedToken(marker, special=False, normalized=False)])
    marker_id = twin.token_to_id(marker)
    assert marker_id is not None
    return twin, marker_id


def _as_special(token: AddedToken, special: bool) -> AddedToken:
    return AddedToken(
        token.content,
        special=special,
        normalized=token.normalized,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )
