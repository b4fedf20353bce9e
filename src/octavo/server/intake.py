"""From the body of a generation request to the Generation that answers it; the same for every route."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Scope

import octavo
from octavo.request import SamplingParams
from octavo.server.explained import Entry
from octavo.server.failures import BodyTimeoutError, BodyTooLargeError, ModelUnknownError
from octavo.server.generation import Generation, Prompt
from octavo.server.quotas import spend
from octavo.server.schema import GenerationBody, check_supported, decode_body, lenient, refuse, sampling_params
from octavo.server.sse import GenerationResponse, Renderer
from octavo.server.state import ServerState
from octavo.server.tenants import tenant_of

BodyT = TypeVar("BodyT", bound=GenerationBody)
StructT = TypeVar("StructT", bound=msgspec.Struct)


BODY_TIMEOUT = 60.0  # seconds in which at least something of a body must arrive


@dataclass(frozen=True, slots=True)
class Parsed(Generic[BodyT]):
    """A body that passed all checks that need no tokenizer. `size` in bytes."""

    body: BodyT
    params: SamplingParams
    size: int


async def read_generation(request: Request, state: ServerState, body_type: type[BodyT]) -> Parsed[BodyT]:
    """Everything that can be refused without the tokenizer is refused here."""
    body, size = await read_json(request, state, body_type)
    return check_generation(body, size, state)


def check_generation(body: BodyT, size: int, state: ServerState) -> Parsed[BodyT]:
    check_model(body.model, state)
    check_supported(body)
    if body.explain and not state.settings.explain:
        raise refuse("explain is switched off on this server", "explain", code="unsupported_field")
    return Parsed(body, sampling_params(body, state.settings.presets), size)


async def read_json(request: Request, state: ServerState, body_type: type[StructT]) -> tuple[StructT, int]:
    """The body of any POST route, type-checked, and its size in bytes."""
    state.check_open()
    raw = await read_body(request, state.settings.max_body_bytes)
    if state.settings.ignore_unknown_fields:
        body_type = lenient(body_type)
    # Parsing is some 50 times faster than tokenising.
    return await state.run(len(raw) // 50, lambda: decode_body(raw, body_type)), len(raw)


def check_model(name: str | None, state: ServerState) -> None:
    if name is None:
        raise refuse("model is required", "model", code="missing_field")
    if name != state.settings.model_name:
        raise ModelUnknownError


async def read_body(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared[:18]) > limit:
        raise BodyTooLargeError(limit)
    chunks, size = [], 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise BodyTimeoutError(BODY_TIMEOUT) from None
        if chunk is None:
            break
        size += len(chunk)
        if size > limit:
            raise BodyTooLargeError(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def finish_prompt(prompt: Prompt, body: GenerationBody, state: ServerState, param: str) -> None:
    """Check the ids of one prompt and cut it if truncate_prompt_tokens asks for it."""
    ids, vocab_size = prompt.token_ids, state.settings.vocab_size
    if not ids:
        raise refuse(f"{param} holds no tokens", param, code="empty_prompt")
    if not (min(ids) >= 0 and max(ids) < vocab_size):
        raise refuse(f"{param} must hold token ids from 0 to {vocab_size - 1}", param, code="invalid_token_id")
    keep = body.truncate_prompt_tokens
    if keep is None:
        return
    if keep < 1 and keep != -1:
        raise refuse("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")
    if keep == -1:
        keep = state.settings.max_model_len - 1
    if len(ids) > keep:
        prompt.num_truncated = len(ids) - keep
        prompt.token_ids = ids[-keep:]


def make_generation(state: ServerState, prompts: list[Prompt], parsed: Parsed[Any], param: str) -> Generation:
    return Generation(
        state.client,
        state.tokenizer,
        state.metrics,
        prompts,
        parsed.params,
        cache_salt=parsed.body.cache_salt or "",
        priority=parsed.body.priority or 0,
        pin_seconds=parsed.body.cache_pin,
        param=param,
    )


def respond(state: ServerState, generation: Generation, renderer: Renderer, body: GenerationBody) -> GenerationResponse:
    entry: Entry | None = None
    scope: Scope | None = None

    def begin(given: Scope) -> None:
        nonlocal entry, scope
        scope = given
        state.enter()
        generation.tenant = tenant_of(scope)
        generation.cache_salt = state.salts.salt(generation.tenant, generation.cache_salt)
        entry = Entry(scope["state"]["request_id"], scope["path"], generation)
        entry.traceparent = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"traceparent"), "")
        state.book.open(entry)

    def end() -> None:
        state.leave()
        if scope is not None:
            num_prompt = sum(len(p.token_ids) for p in generation.prompts) if generation.admitted else 0
            spend(scope, num_prompt, sum(c.num_tokens for c in generation.choices))
        if entry is not None:
            state.book.close(entry)

    return GenerationResponse(
        generation,
        renderer,
        stream=bool(body.stream),
        explained=bool(body.explain),
        keep_alive=state.settings.sse_keep_alive,
        on_start=begin,
        on_end=end,
    )


def base_fields(state: ServerState, prefix: str) -> dict[str, Any]:
    return {
        "id": prefix + uuid.uuid4().hex,
        "object": "",
        "created": int(time.time()),
        "model": state.settings.model_name,
        "system_fingerprint": f"octavo-{octavo.__version__}",
    }
