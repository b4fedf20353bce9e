"""Builds a tokenizer from the `tokenizer.ggml.*` metadata of a GGUF file.

Source: the GGUF specification (ggml, docs/gguf.md) and, where it is silent, what llama.cpp and the
tokenizer.json files of the same models do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.errors import CorruptFileError, UnsupportedError
from octavo.text.parts import PieceStyle, TokenizerParts, turn_closer_ids

_PREFIX = "tokenizer.ggml."
_HINT = "pass --tokenizer DIR with a tokenizer.json"
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # token_type; 1 is an ordinary token

# Alternatives shared by the patterns below.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class _PreTokenizer:
    """One value of `tokenizer.ggml.pre`: how text is cut before the merges."""

    patterns: tuple[str, ...] = ()  # cut in turn; none: GPT-2's own pattern, built into ByteLevel
    digits: bool = False  # every digit apart, before anything else
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False  # where the file does not say

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.extend(pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns)
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(steps)


_GPT2_PRE = _PreTokenizer()
_DIGITS_PRE = _PreTokenizer(digits=True)
_LLAMA3_PRE = _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_PRE = _PreTokenizer((_QWEN2,), nfc=True)
_PRE_TOKENIZERS = {
    "default": _GPT2_PRE,
    "gpt-2": _GPT2_PRE,
    "gpt2": _GPT2_PRE,
    "phi-2": _GPT2_PRE,
    "olmo": _GPT2_PRE,
    "mpt": _GPT2_PRE,
    "smollm": _DIGITS_PRE,
    "starcoder": _DIGITS_PRE,
    "refact": _DIGITS_PRE,
    "command-r": _DIGITS_PRE,
    "codeshell": _DIGITS_PRE,
    "minerva-7b": _DIGITS_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "llama-bpe": _LLAMA3_PRE,
    "falcon3": _LLAMA3_PRE,
    "smaug-bpe": _PreTokenizer((_LLAMA3,)),
    "dbrx": _PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _PreTokenizer((_QWEN2,)),
    "stablelm2": _PreTokenizer((_QWEN2,)),
    "tekken": _PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": _PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": _PreTokenizer(_DEEPSEEK_V3),
}


@dataclass(frozen=True)
class _Vocabulary:
    """The lists of the file, checked: `tokens[i]` and `types[i]` belong to id i."""

    tokens: list[str]
    types: Sequence[int]
    bos: int | None
    eos: int | None
    extra_ends: frozenset[int]  # end of turn, end of message
    unk: int | None
    pad: int | None

    @property
    def control_ids(self) -> set[int]:
        """Ids that are special: marked so, or named as begin or end (some files forget the mark)."""
        ids = {i for i, t in enumerate(self.types) if t in (_CONTROL, _UNKNOWN)}
        return ids | self.extra_ends | {i for i in (self.bos, self.eos) if i is not None}


def read_gguf_tokenizer(metadata: dict[str, Any]) -> TokenizerParts:
    """Raises UnsupportedError (no tokenizer, or of an unknown kind) or CorruptFileError (its lists disagree)."""
    kind = metadata.get(_PREFIX + "model")
    if kind is None or not metadata.get(_PREFIX + "tokens"):
        raise UnsupportedError(f"the GGUF file holds no tokenizer ({_PREFIX}model, {_PREFIX}tokens); {_HINT}")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(f"{_PREFIX}model {str(kind)[:64]!r} is not supported by this version; {_HINT}")
    vocabulary = _read_vocabulary(metadata)
    template = metadata.get("tokenizer.chat_template")
    chat_template = template if isinstance(template, str) and template else None
    if kind == "gpt2":
        backend, add_bos, strips = _byte_level_backend(metadata, vocabulary)
    else:
        backend, add_bos, strips = _sentencepiece_backend(metadata, vocabulary)

    tokens = vocabulary.tokens
    control_ids = vocabulary.control_ids
    _add_special_tokens(backend, vocabulary, control_ids)
    ends = {i for i in (vocabulary.eos, *vocabulary.extra_ends) if i is not None}
    ends |= turn_closer_ids(chat_template, backend.token_to_id) & control_ids
    named = {"bos": vocabulary.bos, "eos": vocabulary.eos, "unk": vocabulary.unk, "pad": vocabulary.pad}
    return TokenizerParts(
        backend=backend,
        style=PieceStyle.BYTE_LEVEL if kind == "gpt2" else PieceStyle.SENTENCEPIECE,
        piece=tokens.__getitem__,
        vocab_size=len(tokens),
        special_ids=frozenset(control_ids),
        literal_ids=frozenset(control_ids | {i for i, t in enumerate(vocabulary.types) if t == _USER_DEFINED}),
        bos_token_id=vocabulary.bos,
        eos_token_id=vocabulary.eos,
        eos_token_ids=frozenset(ends),
        add_bos=vocabulary.bos is not None and _flag(metadata, "add_bos_token", add_bos),
        add_eos=vocabulary.eos is not None and _flag(metadata, "add_eos_token", False),
        strips_leading_space=strips,
        chat_template=chat_template,
        special_tokens={f"{name}_token": tokens[i] for name, i in named.items() if i is not None},
    )


def _flag(metadata: dict[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name)
    return default if value is None else bool(value)


def _list(metadata: dict[str, Any], name: str, length: int | None = None) -> list[Any]:
    values = metadata.get(_PREFIX + name)
    if values is None:
        raise CorruptFileError(f"the GGUF file has no {_PREFIX}{name}; {_HINT}")
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise CorruptFileError(f"{_PREFIX}{name} is not an array; {_HINT}")
    if length is not None and len(values) != length:
        raise CorruptFileError(f"{_PREFIX}{name} has {len(values)} entries for {length} tokens")
    return list(values)


def _read_vocabulary(metadata: dict[str, Any]) -> _Vocabulary:
    tokens = _list(metadata, "tokens")
    if not all(isinstance(t, str) for t in tokens):
        raise CorruptFileError(f"{_PREFIX}tokens holds values that are not strings")
    has_types = metadata.get(_PREFIX + "token_type") is not None
    types = _list(metadata, "token_type", len(tokens)) if has_types else [1] * len(tokens)

    def token_id(name: str, usual: tuple[int, str] | None = None) -> int | None:
        value = metadata.get(f"{_PREFIX}{name}_token_id")
        if value is None:
            # SentencePiece fixes these ids; a file of that kind may leave them out.
            is_usual = usual is not None and len(tokens) > usual[0] and tokens[usual[0]] == usual[1]
            return usual[0] if usual is not None and is_usual else None
        if not isinstance(value, int) or not 0 <= value < len(tokens):
            raise CorruptFileError(f"{_PREFIX}{name}_token_id {str(value)[:32]} is not an id of {len(tokens)} tokens")
        return value

    is_llama = metadata[_PREFIX + "model"] == "llama"
    extra = (token_id("eot"), token_id("eom"))
    return _Vocabulary(
        tokens=tokens,
        types=types,
        bos=token_id("bos", (1, "<s>") if is_llama else None),
        eos=token_id("eos", (2, "</s>") if is_llama else None),
        extra_ends=frozenset(i for i in extra if i is not None),
        unk=token_id("unknown", (0, "<unk>") if is_llama else None),
        pad=token_id("padding"),
    )


def _byte_level_backend(metadata: dict[str, Any], vocabulary: _Vocabulary) -> tuple[Backend, bool, bool]:
    """Byte-level BPE: (backend, adds BOS by default, strips a leading space)."""
    name = metadata.get(_PREFIX + "pre", "default")
    pre = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise UnsupportedError(f"{_PREFIX}pre {str(name)[:64]!r} is not supported by this version; {_HINT}")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else () for m in _list(metadata, "merges")]
    bad = next((i for i, pair in enumerate(merges) if len(pair) != 2), None)
    if bad is not None:
        raise CorruptFileError(f"{_PREFIX}merges: entry {bad} is not a pair of tokens")
    backend = Backend(_bpe(vocabulary.tokens, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos, False


def _sentencepiece_backend(metadata: dict[str, Any], vocabulary: _Vocabulary) -> tuple[Backend, bool, bool]:
    """SentencePiece BPE with byte fallback: (backend, adds BOS by default, strips a leading space)."""
    scores = _list(metadata, "scores", len(vocabulary.tokens))
    space = _flag(metadata, "add_space_prefix", True)
    unk = None if vocabulary.unk is None else vocabulary.tokens[vocabulary.unk]
    merges = merges_from_scores(vocabulary.tokens, scores, vocabulary.types)
    backend = Backend(_bpe(vocabulary.tokens, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("\u2581")] if space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True, space


def _bpe(tokens: list[str], merges: list[Any], **options: Any) -> models.BPE:
    vocab = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))  # of equal texts the first counts
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # tokenizers raises bare Exception
        raise CorruptFileError(f"{_PREFIX}merges do not fit the tokens: {str(error)[:200]}") from None


def merges_from_scores(tokens: list[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """BPE merges, best first, equivalent to SentencePiece's scores.

    SentencePiece joins the adjacent pair whose union has the highest score; so every way to cut a token
    into two tokens is a merge with the rank of that token's score. Ties: the longer left part first, as
    transformers' converter orders them.
    """
    skipped = (_CONTROL, _UNKNOWN, _USER_DEFINED, _UNUSED, _BYTE)
    ordinary = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind not in skipped}
    cuts: list[tuple[float, int, str, str]] = []
    for token, score in ordinary.items():
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in ordinary and right in ordinary:
                cuts.append((-score, -i, left, right))
    cuts.sort(key=lambda cut: (cut[0], cut[1], -len(cut[3])))
    return [(left, right) for _, _, left, right in cuts]


def _add_special_tokens(backend: Backend, vocabulary: _Vocabulary, control_ids: set[int]) -> None:
    """Makes special and user-defined tokens match as wholes, before the pre-tokenizer."""
    added = sorted(control_ids | {i for i, kind in enumerate(vocabulary.types) if kind == _USER_DEFINED})
    texts = ((vocabulary.tokens[i], i in control_ids) for i in added)
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in texts if text])
