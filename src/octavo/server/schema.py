"""Request bodies of the HTTP API: what is accepted, what is refused, and the SamplingParams they become."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from octavo.errors import RequestError
from octavo.request import MAX_LOGPROBS, MAX_SAMPLES, SamplingParams
from octavo.server.structured import wish_of

MAX_PROMPTS = 1024
MAX_CHOICES = 1024
MAX_MESSAGE_LENGTH = 500
MAX_SALT_LENGTH = 256
INT_LIMIT = 2**31 - 1

# Sampling fields that a model's generation_config may preset, as vLLM does.
PRESET_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both generation routes share. `None` always means "not given", as in the OpenAI API."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    explain: bool | None = None
    cache_pin: float | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Accepted without effect: they change nothing about the text.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    suffix: str | None = None
    logprobs: int | None = None
    echo: bool | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None


BodyT = TypeVar("BodyT", bound=msgspec.Struct)


@cache
def lenient(body_type: type[BodyT]) -> type[BodyT]:
    """The same body without the refusal of unknown fields (--ignore-unknown-fields)."""
    made = msgspec.defstruct(body_type.__name__, [], bases=(body_type,), forbid_unknown_fields=False, kw_only=True)
    return cast("type[BodyT]", made)


def refuse(message: str, param: str | None = None, code: str = "invalid_value") -> RequestError:
    """A RequestError (400) whose message is bounded."""
    return RequestError(message[:MAX_MESSAGE_LENGTH], param=param, code=code)


def decode_body(raw: bytes, body_type: type[BodyT]) -> BodyT:
    """Parse and type-check a JSON body. Raises RequestError; the message never echoes values of the body."""
    try:
        return msgspec.json.decode(raw, type=body_type)
    except msgspec.ValidationError as e:
        raise _explain(str(e)) from None
    except RecursionError:
        raise refuse("the JSON body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as e:
        raise refuse(f"the body is not valid JSON: {e}", code="invalid_json") from None


def _explain(text: str) -> RequestError:
    """msgspec says "... unknown field `x`" or "Expected `int`, got `str` - at `$.n`": find the field."""
    unknown = "Object contains unknown field `"
    if text.startswith(unknown):
        name, _, where = text[len(unknown) :].partition("`")
        name = name[:64]
        return refuse(f"unknown field {name!r}{where[:100]}", name, code="unknown_field")
    what, _, path = text.partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")[:100]
    param = path.split(".")[0].split("[")[0] or None
    return refuse(f"{path or 'body'}: {what}", param, code="invalid_type")


def check_supported(body: GenerationBody) -> None:
    """Refuse what this version would have to ignore although it changes the meaning."""
    n = 1 if body.n is None else body.n
    if body.stream and body.best_of is not None and body.best_of > n:
        raise refuse("best_of greater than n cannot be streamed: the best are known at the end", "best_of")
    if body.store:
        raise _unsupported("store", "storing responses")
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options is only allowed with stream: true", "stream_options")
    if body.cache_salt is not None and len(body.cache_salt) > MAX_SALT_LENGTH:
        raise refuse(f"cache_salt takes at most {MAX_SALT_LENGTH} characters", "cache_salt")
    if isinstance(body, CompletionBody):
        if body.suffix:
            raise _unsupported("suffix", "suffix")
    elif isinstance(body, ChatBody):
        _check_supported_chat(body)


def _check_supported_chat(body: ChatBody) -> None:
    for name in ("functions", "audio", "prediction", "web_search_options", "moderation"):
        if getattr(body, name):
            raise _unsupported(name, name)
    for name in ("reasoning_effort", "verbosity"):
        if getattr(body, name) is not None:
            raise _unsupported(name, name)
    if body.function_call not in (None, "none", "auto"):
        raise _unsupported("function_call", "function_call other than 'none' and 'auto'")
    if body.modalities is not None and body.modalities != ["text"]:
        raise _unsupported("modalities", "modalities other than ['text']")
    if body.continue_final_message and body.add_generation_prompt:
        raise refuse("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")


def _unsupported(param: str, what: str) -> RequestError:
    return refuse(f"{what} is not supported yet", param, code="unsupported_field")


def sampling_params(body: GenerationBody, presets: Mapping[str, Any]) -> SamplingParams:
    """The SamplingParams of a body; `presets` are sampling values of the model's generation_config."""
    if body.use_beam_search:
        presets = {}  # they are about drawing tokens, which a search does not do
    values: dict[str, Any] = {name: presets[name] for name in PRESET_FIELDS if name in presets}
    for name in (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids",
        "min_tokens", "presence_penalty", "frequency_penalty", "n", "best_of", "ignore_eos",
        "use_beam_search", "length_penalty", "early_stopping",
        "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs",
    ):  # fmt: skip
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    for name in ("top_k", "min_tokens", "priority", "truncate_prompt_tokens"):
        value = getattr(body, name)
        if value is not None and abs(value) > INT_LIMIT:
            raise refuse(f"{name} is out of range", name)
    if any(not 0 <= token_id <= INT_LIMIT for token_id in body.stop_token_ids or ()):
        raise refuse("stop_token_ids must hold token ids", "stop_token_ids")
    values["structured_outputs"] = wish_of(body)
    values["logit_bias"] = _logit_bias(body.logit_bias)
    values["max_tokens"] = _max_tokens(body)
    values["logprobs"] = _num_logprobs(body)
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return SamplingParams(**values)


def _max_tokens(body: GenerationBody) -> int | None:
    """completions: 16 unless given. chat: all the room, max_completion_tokens before max_tokens, at least 1."""
    if not isinstance(body, ChatBody):
        return 16 if body.max_tokens is None else min(body.max_tokens, INT_LIMIT)
    name, value = "max_completion_tokens", body.max_completion_tokens
    if value is None:
        name, value = "max_tokens", body.max_tokens
    if value is None:
        return None
    if value < 1:
        raise refuse(f"{name} must be an integer of at least 1", name)
    return min(value, INT_LIMIT)


def _num_logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    assert isinstance(body, ChatBody)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise refuse("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise refuse(f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _logit_bias(raw: Mapping[str, float] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (raw or {}).items():
        # int() would also take " 5", "1_0" and digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise refuse("logit_bias keys must be token ids in decimal digits", "logit_bias")
        bias[int(key)] = value
    return bias


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a completion body, each a text or a list of token ids."""
    prompt = body.prompt
    if prompt is None:
        raise refuse("prompt is required", "prompt", code="missing_field")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refuse("prompt must not be an empty list", "prompt", code="empty_prompt")
    if all(isinstance(p, int) for p in prompt):
        return [prompt]  # type: ignore[list-item]
    if all(isinstance(p, str) for p in prompt) or all(isinstance(p, list) for p in prompt):
        if len(prompt) > MAX_PROMPTS:
            raise refuse(f"prompt takes at most {MAX_PROMPTS} prompts in one request", "prompt")
        return prompt  # type: ignore[return-value]
    raise refuse("prompt must be a text, a list of texts, a list of token ids or a list of those", "prompt")


def check_num_choices(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        raise refuse(
            f"{num_prompts} prompts with {n} samples each make more than {MAX_CHOICES} choices in one request",
            "n" if n > 1 else "prompt",
        )


assert MAX_SAMPLES <= MAX_CHOICES
