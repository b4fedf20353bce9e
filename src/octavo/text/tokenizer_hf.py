"""Builds a tokenizer from a Hugging Face model directory (tokenizer.json and its neighbours)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.errors import CorruptFileError, ModelNotFoundError, UnsupportedError
from octavo.text.parts import PieceStyle, TokenizerParts, turn_closer_ids

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_hf_tokenizer(path: Path) -> TokenizerParts:
    """`path`: a directory, or a tokenizer.json in one. ModelError where it cannot be used."""
    directory = path.parent if path.name == "tokenizer.json" else path
    backend = _read_backend(directory)
    config = _read_json(directory / "tokenizer_config.json")
    generation = _read_json(directory / "generation_config.json")
    style, strips = _decoder_style(backend, directory)

    special_tokens = _special_tokens(config)
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extras = [_content(t) for t in (listed.values() if isinstance(listed, dict) else listed)]
    named = [t for t in (*special_tokens.values(), *extras) if t and backend.token_to_id(t) is not None]
    added = backend.get_added_tokens_decoder()
    texts = {token.content for token in added.values()}
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in named if t not in texts])
    added = backend.get_added_tokens_decoder()
    special_ids = {i for i, token in added.items() if token.special or token.content in named}

    vocab_size = max([backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)])
    chat_template = _chat_template(directory, config)
    bos, eos = (_id_of(backend, special_tokens.get(name)) for name in ("bos_token", "eos_token"))
    ends = _generation_eos(generation, directory, vocab_size)
    if not ends:
        ends = turn_closer_ids(chat_template, backend.token_to_id)
    return TokenizerParts(
        backend=backend,
        style=style,
        piece=backend.id_to_token,
        vocab_size=vocab_size,
        special_ids=frozenset(special_ids),
        literal_ids=frozenset(added),
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=frozenset(ends | ({eos} if eos is not None else set())),
        strips_leading_space=strips,
        chat_template=chat_template,
        special_tokens=special_tokens,
    )


def _read_backend(directory: Path) -> Backend:
    path = directory / "tokenizer.json"
    if not path.is_file():
        if (directory / "tokenizer.model").is_file():
            raise UnsupportedError(
                f"{directory} has only tokenizer.model (SentencePiece); Octavo needs tokenizer.json, which "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes"
            )
        raise ModelNotFoundError(f"{directory} has no tokenizer.json; pass --tokenizer DIR with one")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CorruptFileError(f"{path} is not a readable tokenizer.json: {str(error)[:200]}") from None
    # Some files carry the settings of their training; a server must neither cut nor pad.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} does not hold a JSON object")
    return value


def _decoder_style(backend: Backend, directory: Path) -> tuple[PieceStyle, bool]:
    """How pieces become bytes, and whether a text loses one leading space."""
    if backend.decoder is None:
        return PieceStyle.WORDS, True
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return PieceStyle.BYTE_LEVEL, False
    if kinds == {"Metaspace"}:
        return PieceStyle.SENTENCEPIECE, steps[0].get("prepend_scheme") != "never"
    if "Replace" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        strips = any(step["type"] == "Strip" and step.get("start", 0) > 0 for step in steps)
        return PieceStyle.SENTENCEPIECE, strips
    raise UnsupportedError(
        f"{directory}/tokenizer.json: decoder {', '.join(sorted(kinds))[:100]} is not supported by this version"
    )


def _content(token: object) -> str | None:
    """Special tokens are written as a text or as an object that holds it."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = ((name, _content(config.get(name))) for name in _NAMED_TOKENS)
    return {name: text for name, text in found if text}


def _id_of(backend: Backend, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _generation_eos(generation: dict[str, Any], directory: Path, vocab_size: int) -> set[int]:
    value = generation.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
            raise CorruptFileError(
                f"{directory}/generation_config.json: eos_token_id {str(i)[:32]} is not an id of {vocab_size} tokens"
            )
    return set(ids)


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja comes first, as in transformers; of several named templates the one called "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except ValueError:
            raise CorruptFileError(f"{path} is not UTF-8 text") from None
    template = config.get("chat_template")
    if template is None:
        template = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None
