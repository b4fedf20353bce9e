"""An Assembly over a pure Python backend and a tokenizer of single bytes, for tests of everything above the engine."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import pre_tokenizers

from octavo.assemble import Assembly, put_together
from octavo.config import EngineOptions, Environment, resolve
from octavo.models.loading import LoadedModel
from octavo.system import CpuInfo, MemoryInfo
from octavo.text.tokenizer import Tokenizer
from support.script_backend import HashBackend, SlotBackend
from support.tiny_models import tiny_spec

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
VOCAB_SIZE = 256 + len(SPECIALS)


@cache
def byte_metadata() -> dict[str, Any]:
    """GGUF metadata of a tokenizer with one token per byte."""
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * 256,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


@cache
def byte_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(byte_metadata())


def ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text)


def fake_assembly(
    backend: SlotBackend | None = None,
    *,
    with_tokenizer: bool = True,
    generation_config: dict[str, Any] | None = None,
    max_position: int = 512,
    **options: Any,
) -> Assembly:
    """Keyword arguments are those of EngineOptions."""
    chosen = EngineOptions(**{"max_num_seqs": 8, **options})
    model = LoadedModel(
        name="fake",
        spec=tiny_spec(vocab_size=VOCAB_SIZE, max_position_embeddings=max_position),
        tensors={},
        tokenizer_source=byte_metadata(),
        generation_config=generation_config or {},
    )
    resolved = resolve(chosen, model.spec, Environment(), CpuInfo(((0,), (1,)), None))
    return put_together(
        model,
        byte_tokenizer if with_tokenizer else None,
        backend or HashBackend(vocab_size=VOCAB_SIZE, block_size=chosen.block_size),
        chosen,
        resolved,
        MemoryInfo(total=1 << 30, available=1 << 30, source="test"),
    )
