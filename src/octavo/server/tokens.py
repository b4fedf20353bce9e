"""POST /tokenize and /detokenize: token ids as the generation routes would see them, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.failures import json_response
from octavo.server.intake import check_model, read_json
from octavo.server.schema import refuse
from octavo.server.state import ServerState
from octavo.text.chat import render_chat


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text (`prompt`) or a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None


async def tokenize(request: Request, state: ServerState) -> Response:
    body, size = await read_json(request, state, TokenizeBody)
    if body.model is not None:
        check_model(body.model, state)
    if (body.prompt is None) == (body.messages is None):
        raise refuse("either prompt or messages is required", "prompt", code="missing_field")
    token_ids = await state.run(size, lambda: _token_ids(body, state))
    pieces = [state.tokenizer.stored_piece(i) for i in token_ids] if body.return_token_strs else None
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": state.settings.max_model_len,
            "tokens": token_ids,
            "token_strs": pieces,
        }
    )


def _token_ids(body: TokenizeBody, state: ServerState) -> list[int]:
    """As /v1/completions reads a prompt (with BOS where the model wants it), or chat a conversation."""
    if body.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(body, name) is not None:
                raise refuse(f"{name} is only allowed with messages", name)
        add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
        return state.tokenizer.encode(body.prompt, add_special_tokens=add_special_tokens)
    if body.add_special_tokens:
        raise refuse("the chat template writes special tokens itself", "add_special_tokens")
    continue_final = bool(body.continue_final_message)
    return render_chat(
        state.tokenizer,
        body.messages or [],
        add_generation_prompt=(
            not continue_final if body.add_generation_prompt is None else body.add_generation_prompt
        ),
        continue_final_message=continue_final,
        chat_template=state.settings.chat_template,
        trust_special_tokens=state.settings.trust_special_tokens,
        tools=body.tools,
        template_kwargs=body.chat_template_kwargs,
    )


async def detokenize(request: Request, state: ServerState) -> Response:
    """The text of `tokens`, special tokens included."""
    body, size = await read_json(request, state, DetokenizeBody)
    if body.model is not None:
        check_model(body.model, state)
    tokens = body.tokens
    if tokens is None:
        raise refuse("tokens is required", "tokens", code="missing_field")
    vocab_size = state.settings.vocab_size
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise refuse(f"tokens must hold token ids from 0 to {vocab_size - 1}", "tokens", code="invalid_token_id")
    text = await state.run(size, lambda: state.tokenizer.decode(tokens, skip_special_tokens=False))
    return json_response({"prompt": text})
