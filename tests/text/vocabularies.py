"""Small vocabularies of each kind, as GGUF metadata."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "hello hello world world 12 345 6789 hello world",
    "你好世界 你好世界 世界你好 こんにちは世界 世界世界",
    "Привет мир, привет мир 😀😀😀 naïve café",
    "    return x\n\n    return y\r\n\tindent",
]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def _trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary, trained without a word pattern so that tokens cross characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=460,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=8,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    pairs = json.loads(backend.to_str())["model"]["merges"]
    return tokens, [" ".join(pair) for pair in pairs]


def byte_level(**changes: Any) -> dict[str, Any]:
    """gpt2 kind: 3 control tokens, 256 bytes, merges. `changes` are set under tokenizer.ggml.; None removes."""
    tokens, merges = _trained()
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    return _changed(metadata, changes)


PIECES = (
    ("▁", -1000.0),
    *((c, -500.0 - i) for i, c in enumerate("abcdehlorwtn.,1é世")),
    ("he", -1.0),
    ("▁h", -2.0),
    ("ll", -3.0),
    ("hell", -4.0),
    ("▁he", -5.0),
    ("hello", -6.0),
    ("▁hello", -7.0),
    ("▁w", -8.0),
    ("or", -9.0),
    ("▁wor", -10.0),
    ("ld", -11.0),
    ("▁world", -12.0),
    ("▁▁", -13.0),
    ("aa", -14.0),
    ("aaa", -15.0),
)


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """llama kind: <unk>, <s>, </s>, 256 byte tokens, pieces with scores."""
    head = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    data = [(f"<0x{b:02X}>", 0.0) for b in range(256)]
    entries = [*head, *data, *PIECES]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [t for t, _ in entries],
        "tokenizer.ggml.scores": [s for _, s in entries],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _changed(metadata, changes)


def _changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if value is None:
            metadata.pop(key, None)
        else:
            metadata[key] = value
    return metadata
