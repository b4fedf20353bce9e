"""The shapes of answers, for the API description; what is sent may hold more, never less."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class PromptDetails(msgspec.Struct):
    """`cached_tokens` were found in the prefix cache; `truncated_tokens` were cut by truncate_prompt_tokens."""

    cached_tokens: int
    truncated_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: int | str | None


class Completion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseAnswer(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage


class MessageUsage(msgspec.Struct):
    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class CountTokensAnswer(msgspec.Struct):
    input_tokens: int


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """A list of numbers, or with encoding_format base64 their bytes (float32, little-endian)."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class RequestStory(msgspec.Struct):
    object: Literal["request"]
    id: str
    route: str
    status: str
    seconds: float
    num_prompt_tokens: int
    num_generated_tokens: int
    finish_reasons: list[str | None]
    prompts: list[dict[str, Any]]


class CachePin(msgspec.Struct):
    object: Literal["cache.pin"]
    id: str
    owner: str
    num_tokens: int
    age_seconds: float
    expires_in_seconds: float


class CachePinDeleted(msgspec.Struct):
    object: Literal["cache.pin"]
    id: str
    deleted: bool


class CacheReport(msgspec.Struct):
    object: Literal["cache"]
    block_size: int
    num_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    max_pinned_blocks: int
    tenant_quota_blocks: int | None
    num_trees: int
    trees: list[dict[str, Any]]
    pins: list[dict[str, Any]]


class KeyUsage(msgspec.Struct):
    object: Literal["usage"]
    key: str
    active_requests: int
    today: dict[str, int]
    total: dict[str, int]
    limits: dict[str, int | None]


class Health(msgspec.Struct):
    status: Literal["ok", "busy"]
    engine_restarts: int
    step_running_s: float
    engine_silent_s: float


class Version(msgspec.Struct):
    version: str
