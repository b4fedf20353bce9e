"""GET /v1/cache, POST /v1/cache/pins and DELETE /v1/cache/pins/ID: what the prefix cache holds, and what it keeps."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.kv.prefix import extend_block_hashes
from octavo.kv.retention import pin_id_of
from octavo.request import SamplingParams
from octavo.server.chat import chat_generation
from octavo.server.completions import make_prompts
from octavo.server.failures import PinLimitError, PinUnknownError, json_response
from octavo.server.generation import Generation
from octavo.server.intake import Parsed, check_model, finish_prompt, make_generation, read_json
from octavo.server.quotas import spend
from octavo.server.schema import ChatBody, CompletionBody, check_supported, refuse
from octavo.server.state import ServerState
from octavo.server.tenants import tenant_of

DEFAULT_TREES, MAX_TREES = 100, 10_000


class PinBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/cache/pins: a prompt as text or token ids, or the messages that conversations begin with."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    ttl_seconds: float | None = None
    cache_salt: str | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def _visible(request: Request, state: ServerState) -> str | None:
    """Whose cache entries the sender may see: with keys those of its tenant, else all."""
    return None if state.accounts is None else tenant_of(request.scope)


async def list_cache(request: Request, state: ServerState) -> Response:
    state.check_open()
    text = request.query_params.get("limit", str(DEFAULT_TREES))
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) <= MAX_TREES):
        raise refuse(f"limit must be an integer from 0 to {MAX_TREES}", "limit")
    report = await state.client.cache_report(_visible(request, state), int(text))
    return json_response({"object": "cache", **report})


async def create_pin(request: Request, state: ServerState) -> Response:
    """Computes the prompt if need be and pins its full blocks."""
    body, size = await read_json(request, state, PinBody)
    check_model(body.model, state)
    if body.ttl_seconds is None:
        raise refuse("ttl_seconds is required", "ttl_seconds", code="missing_field")
    generation = await _generation(body, size, state)
    generation.pin_seconds = body.ttl_seconds
    generation.tenant = tenant_of(request.scope)
    generation.cache_salt = state.salts.salt(generation.tenant, generation.cache_salt)
    await _compute(request, state, generation)
    report = await state.client.cache_report(generation.tenant, 0)
    hashes: list[bytes] = []
    token_ids, block_size = generation.prompts[0].token_ids, report["block_size"]
    extend_block_hashes(hashes, token_ids, len(token_ids) // block_size, block_size, generation.cache_salt)
    wanted = pin_id_of(generation.tenant, hashes[-1])
    pin = next((pin for pin in report["pins"] if pin["id"] == wanted), None)
    if pin is None:
        raise PinLimitError(report["num_pinned_blocks"], report["max_pinned_blocks"])
    return json_response({"object": "cache.pin", **pin})


async def _generation(body: PinBody, size: int, state: ServerState) -> Generation:
    params = SamplingParams(max_tokens=0)
    if (body.prompt is None) == (body.messages is None):
        raise refuse("give either prompt or messages", "prompt")
    if body.messages is not None:
        chat = ChatBody(
            messages=body.messages,
            cache_salt=body.cache_salt,
            add_generation_prompt=bool(body.add_generation_prompt),
            chat_template_kwargs=body.chat_template_kwargs,
        )
        check_supported(chat)
        generation, _ = await chat_generation(state, Parsed(chat, params, size))
        return generation
    if body.add_generation_prompt is not None or body.chat_template_kwargs is not None:
        raise refuse("add_generation_prompt and chat_template_kwargs go with messages", "add_generation_prompt")
    prompt: Any = body.prompt
    completion = CompletionBody(prompt=prompt, cache_salt=body.cache_salt)
    check_supported(completion)
    prompts = await state.run(size, lambda: make_prompts(state.tokenizer, completion, True))
    finish_prompt(prompts[0], completion, state, "prompt")
    return make_generation(state, prompts, Parsed(completion, params, size), "prompt")


async def _compute(request: Request, state: ServerState, generation: Generation) -> None:
    """Runs the prompt through the engine; it counts as a request of its sender."""
    state.enter()
    error: BaseException | None = None
    try:
        await generation.submit()
        while not generation.done:
            await generation.updates()
    except BaseException as e:
        error = e
        if isinstance(e, RequestError) and e.param == "cache_pin":
            e.param = "ttl_seconds" if "seconds" in e.message else "prompt"
        raise
    finally:
        generation.close(error)
        state.leave()
        spend(request.scope, len(generation.prompts[0].token_ids) if generation.admitted else 0, 0)


async def delete_pin(request: Request, state: ServerState) -> Response:
    state.check_open()
    name = request.path_params["id"]
    if not await state.client.unpin(name, _visible(request, state)):
        raise PinUnknownError
    return json_response({"object": "cache.pin", "id": name, "deleted": True})
