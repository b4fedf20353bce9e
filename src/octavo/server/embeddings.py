"""POST /v1/embeddings: the hidden states of texts, pooled."""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec
from starlette.requests import Request

from octavo.embedding import vector
from octavo.request import Pooling, SamplingParams
from octavo.server.generation import Generation, Prompt, Update
from octavo.server.intake import Parsed, check_model, finish_prompt, make_generation, read_json, respond
from octavo.server.schema import MAX_SALT_LENGTH, CompletionBody, prompts_of, refuse
from octavo.server.sse import GenerationResponse, OpenAiErrors
from octavo.server.state import ServerState
from octavo.server.translate import renamed


class EmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`None` always means "not given"."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    # Not OpenAI's.
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    explain: bool | None = None
    # Accepted without effect.
    user: str | None = None


async def create_embeddings(request: Request, state: ServerState) -> GenerationResponse:
    body, size = await read_json(request, state, EmbeddingsBody)
    check_model(body.model, state)
    if body.dimensions is not None and body.dimensions < 1:
        raise refuse("dimensions must be an integer of at least 1", "dimensions")
    if body.cache_salt is not None and len(body.cache_salt) > MAX_SALT_LENGTH:
        raise refuse(f"cache_salt takes at most {MAX_SALT_LENGTH} characters", "cache_salt")
    params = SamplingParams(max_tokens=0, pooling=Pooling(body.pooling or state.settings.pooling))
    asked = CompletionBody(
        prompt=body.input,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        cache_salt=body.cache_salt,
        priority=body.priority,
        explain=body.explain,
    )
    with renamed({"prompt": "input"}):
        prompts = await state.run(size, lambda: _prompts(asked, state))
        for prompt in prompts:
            finish_prompt(prompt, asked, state, "input")
        generation = make_generation(state, prompts, Parsed(asked, params, size), "input")
    renderer = EmbeddingsRenderer(generation, body, state.settings.model_name)
    return respond(state, generation, renderer, asked)


def _prompts(asked: CompletionBody, state: ServerState) -> list[Prompt]:
    return [Prompt(state.tokenizer.encode(p) if isinstance(p, str) else p) for p in prompts_of(asked)]


class EmbeddingsRenderer(OpenAiErrors):
    """The `list` of embeddings. They are never streamed."""

    def __init__(self, generation: Generation, body: EmbeddingsBody, model_name: str) -> None:
        self._generation = generation
        self._body = body
        self._model_name = model_name

    def opening(self) -> list[bytes]:
        return []

    def chunks(self, update: Update) -> list[bytes]:
        return []

    def closing(self) -> list[bytes]:
        return []

    def full(self) -> dict[str, Any]:
        prompts = self._generation.prompts
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        made: dict[str, Any] = {
            "object": "list",
            "model": self._model_name,
            "data": [
                {"object": "embedding", "index": i, "embedding": self._shown(prompt.embedding)}
                for i, prompt in enumerate(prompts)
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        if self._generation.extension is not None:
            made["octavo"] = self._generation.extension
        return made

    def _shown(self, embedding: bytes) -> list[float] | str:
        body = self._body
        if body.dimensions is not None and body.dimensions * 4 != len(embedding):
            raise refuse(
                f"dimensions: this model has {len(embedding) // 4}, which cannot be changed",
                "dimensions",
                code="unsupported_field",
            )
        values = vector(embedding, normalize=body.normalize is not False)
        if body.encoding_format == "base64":
            return base64.b64encode(values.tobytes()).decode()
        numbers: list[float] = values.tolist()
        return numbers
