"""What lm-eval's local-completions and local-chat-completions send, on a real tiny model: numbers of transformers.

The request bodies and the reading of the answers are those of EleutherAI/lm-evaluation-harness
(lm_eval/models/openai_completions.py), which scores with echo and reads the arrays of `logprobs`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.live_server import SPECIALS, write_tokenizer

from octavo.backends.cpu.backend import CpuBackend
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.models.loading import load_model
from octavo.server.app import ServerSettings, create_app
from octavo.server.client import ThreadEngineClient
from octavo.text.tokenizer import Tokenizer
from octavo.weights.hub import resolve_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PAIRS = [(f"Question {i}: what follows?", answer) for i in range(4) for answer in (" red", f" green {i}", "blue and é")]


class Served:
    """A tiny model, served without a socket, and its original."""

    def __init__(self, directory: Path) -> None:
        write_tokenizer(directory)
        self.tokenizer = Tokenizer.from_directory(directory)
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=self.tokenizer.vocab_size, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.original = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.original.save_pretrained(directory)
        self._loaded = load_model(resolve_model(str(directory)))

    def post(self, *requests: tuple[str, dict[str, Any]]) -> list[Any]:
        """The answers to (path, body) pairs, sent at the same time."""

        async def run() -> list[Any]:
            backend = CpuBackend(
                self._loaded, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, kv_cache_dtype="float32"
            )
            client = ThreadEngineClient(
                Engine(EngineConfig(max_model_len=256, num_blocks=64, max_num_batched_tokens=64), backend)
            )
            settings = ServerSettings(model_name="tiny", max_model_len=256, vocab_size=self.tokenizer.vocab_size)
            app = create_app(client, self.tokenizer, settings)
            await client.start()
            try:
                transport = httpx.ASGITransport(app=app)
                async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as http:
                    answers = await asyncio.gather(*(http.post(path, json=body) for path, body in requests))
            finally:
                await client.close()
            for answer in answers:
                assert answer.status_code == 200, answer.text
            return [answer.json() for answer in answers]

        return asyncio.run(run())

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            logits = self.original(torch.tensor([token_ids])).logits[0]
        return torch.log_softmax(logits.double(), dim=-1).numpy()  # type: ignore[no-any-return]

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        ids = list(token_ids)
        for _ in range(num_tokens):
            ids.append(int(self.logprobs(ids)[-1].argmax()))
        return ids[len(token_ids) :]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("tiny"))


def scoring_body(prompts: list[list[int]], **changes: Any) -> dict[str, Any]:
    fixed = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    return {**fixed, "prompt": prompts, **changes}


def score(choice: dict[str, Any], num_context: int, *, num_generated: int = 1) -> tuple[float, bool]:
    """As lm-eval's parse_logprobs: the sum over the continuation, and whether it is the greedy one."""
    logprobs = choice["logprobs"]
    end = len(logprobs["token_logprobs"]) - num_generated
    chosen = logprobs["token_logprobs"][num_context:end]
    tops = logprobs["top_logprobs"][num_context:end]
    return sum(chosen), all(value == max(top.values()) for value, top in zip(chosen, tops, strict=True))


@pytest.mark.parametrize("max_tokens", [1, 0])
def test_loglikelihood(served: Served, max_tokens: int) -> None:
    contexts = [served.tokenizer.encode(context) for context, _ in PAIRS]
    wholes = [c + served.tokenizer.encode(answer) for c, (_, answer) in zip(contexts, PAIRS, strict=True)]
    greedy = contexts[0] + served.greedy(contexts[0], 3)
    contexts, wholes = [*contexts, contexts[0]], [*wholes, greedy]
    batches = [wholes[i : i + 4] for i in range(0, len(wholes), 4)]  # batch_size 4, several at a time
    answers = served.post(*(("/v1/completions", scoring_body(batch, max_tokens=max_tokens)) for batch in batches))
    choices = [c for answer in answers for c in sorted(answer["choices"], key=lambda c: c["index"])]
    assert len(choices) == len(wholes)
    for choice, context, whole in zip(choices, contexts, wholes, strict=True):
        got, is_greedy = score(choice, len(context), num_generated=max_tokens)
        table = served.logprobs(whole)
        places = range(len(context) - 1, len(whole) - 1)
        assert got == pytest.approx(sum(table[i, whole[i + 1]] for i in places), abs=1e-3)
        assert is_greedy == all(table[i].argmax() == whole[i + 1] for i in places)
        assert choice["logprobs"]["token_logprobs"][0] is None
    assert score(choices[-1], len(contexts[-1]), num_generated=max_tokens)[1]


def test_generate_until(served: Served) -> None:
    prompts = [served.tokenizer.encode(context) for context, _ in PAIRS[::3]]
    bodies = [
        {"prompt": [p], "model": "tiny", "max_tokens": 8, "temperature": 0, "stop": ["zzz", "\n\n"], "seed": 1234}
        for p in prompts
    ]
    answers = served.post(*(("/v1/completions", body) for body in bodies))
    for prompt, answer in zip(prompts, answers, strict=True):
        want = served.tokenizer.decode(served.greedy(prompt, 8))
        for stop in ("zzz", "\n\n"):
            want = want.split(stop)[0]
        assert answer["choices"][0]["text"] == want


def test_chat_generate_until(served: Served) -> None:
    messages = [{"role": "user", "content": "What follows?"}]
    body = {
        "messages": messages, "model": "tiny", "max_tokens": 8, "temperature": 0, "stop": ["zzz"], "seed": 1234,
    }  # fmt: skip
    start, end = (served.tokenizer.token_id(text) for text in SPECIALS)
    assert start is not None and end is not None
    prompt = [start, *b"user\nWhat follows?", end, *b"\n", start, *b"assistant\n"]
    (answer,) = served.post(("/v1/chat/completions", body))
    drawn = served.greedy(prompt, 8)
    drawn = drawn[: drawn.index(end)] if end in drawn else drawn
    assert answer["choices"][0]["message"]["content"] == served.tokenizer.decode(drawn).split("zzz")[0]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
