"""POST /v1/chat/completions: the prompt of a conversation, and the JSON of its answer."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from octavo.request import FinishReason
from octavo.server.generation import Choice, Generation, Prompt, Update
from octavo.server.intake import Parsed, base_fields, finish_prompt, make_generation, read_generation, respond
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.schema import ChatBody, refuse
from octavo.server.sse import DONE, GenerationResponse, OpenAiErrors, frame
from octavo.server.state import ServerState
from octavo.server.structured import check_wish, wish_field
from octavo.server.usage import last_chunk, usage_of
from octavo.text.chat import render_chat
from octavo.text.tokenizer import Tokenizer


async def create_chat_completion(request: Request, state: ServerState) -> GenerationResponse:
    parsed = await read_generation(request, state, ChatBody)
    generation = await chat_generation(state, parsed)
    renderer = ChatRenderer(state.tokenizer, generation, base_fields(state, "chatcmpl-"), parsed.body)
    return respond(state, generation, renderer, parsed.body)


async def chat_generation(state: ServerState, parsed: Parsed[ChatBody], param: str = "messages") -> Generation:
    """The generation of a conversation, not yet submitted. `param` is what the client calls its messages."""
    prompt = await state.run(
        parsed.size,
        lambda: make_prompt(
            state.tokenizer,
            parsed.body,
            chat_template=state.settings.chat_template,
            trust_special_tokens=state.settings.trust_special_tokens,
        ),
    )
    finish_prompt(prompt, parsed.body, state, param)
    await check_wish(state, parsed.params.structured_outputs, wish_field(parsed.body) or "tools")
    return make_generation(state, [prompt], parsed, param)


def make_prompt(
    tokenizer: Tokenizer, body: ChatBody, *, chat_template: str | None, trust_special_tokens: bool
) -> Prompt:
    """Render and tokenise; runs in a worker thread for big bodies. Raises RequestError."""
    if not body.messages:
        raise refuse("messages must hold at least one message", "messages", code="missing_field")
    continue_final = bool(body.continue_final_message)
    add_prompt = not continue_final if body.add_generation_prompt is None else body.add_generation_prompt
    token_ids = render_chat(
        tokenizer,
        body.messages,
        add_generation_prompt=add_prompt,
        continue_final_message=continue_final,
        chat_template=chat_template,
        trust_special_tokens=trust_special_tokens,
        template_kwargs=body.chat_template_kwargs,
    )
    return Prompt(token_ids)


class ChatRenderer(OpenAiErrors):
    """The `chat.completion` object, whole or in chunks."""

    def __init__(self, tokenizer: Tokenizer, generation: Generation, base: dict[str, Any], body: ChatBody) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._base = base
        self._with_logprobs = generation.params.logprobs is not None
        self._show_prompt_logprobs = body.prompt_logprobs is not None
        self._include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)

    def opening(self) -> list[bytes]:
        """One chunk per choice names the role."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk([self._delta(choice, role)]) for choice in self._generation.choices]

    def chunks(self, update: Update) -> list[bytes]:
        frames = []
        logprobs = chat_logprobs(self._tokenizer, update.logprobs) if self._with_logprobs and update.logprobs else None
        if update.text or logprobs:
            frames.append(self._chunk([self._delta(update.choice, {"content": update.text}, logprobs)]))
        if update.finish_reason is not None:
            end = self._delta(update.choice, {}, None, update.finish_reason)
            end["stop_reason"] = update.stop_reason
            frames.append(self._chunk([end]))
        return frames

    def closing(self) -> list[bytes]:
        content = {**self._base, "object": "chat.completion.chunk", "choices": []}
        last = last_chunk(content, self._generation, with_usage=self._include_usage)
        return [*map(frame, last), DONE]

    def full(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            **self._base,
            "object": "chat.completion",
            "choices": [self._whole(choice) for choice in self._generation.answers()],
            "usage": usage_of(self._generation),
        }
        if self._generation.extension is not None:
            made["octavo"] = self._generation.extension
        if self._show_prompt_logprobs:
            made["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._generation.prompts[0].logprobs)
        return made

    def _whole(self, choice: Choice) -> dict[str, Any]:
        output = choice.output
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": chat_logprobs(self._tokenizer, output.logprobs) if self._with_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _delta(
        self,
        choice: Choice,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        content = {**self._base, "object": "chat.completion.chunk", "choices": choices}
        if self._include_usage:
            content["usage"] = None
        return frame(content)
