"""POST /v1/chat/completions: the prompt of a conversation, and the JSON of its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request

from octavo.server.answer import (
    AnswerPlan,
    AnswerReader,
    answer_plan,
    call_deltas,
    template_of,
    whole_calls,
    with_plan,
    with_prompt,
)
from octavo.server.generation import Choice, Generation, Prompt, Update
from octavo.server.intake import Parsed, base_fields, finish_prompt, make_generation, read_generation, respond
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.schema import ChatBody, refuse
from octavo.server.sse import DONE, GenerationResponse, OpenAiErrors, frame
from octavo.server.state import ServerState
from octavo.server.structured import check_wish, wish_field
from octavo.server.tools import ToolPlan, with_tool_instructions
from octavo.server.usage import last_chunk, usage_of
from octavo.text.chat import render_chat
from octavo.text.tokenizer import Tokenizer


async def create_chat_completion(request: Request, state: ServerState) -> GenerationResponse:
    parsed = await read_generation(request, state, ChatBody)
    generation, plan = await chat_generation(state, parsed)
    renderer = ChatRenderer(state.tokenizer, generation, base_fields(state, "chatcmpl-"), parsed.body, plan)
    return respond(state, generation, renderer, parsed.body)


async def chat_generation(
    state: ServerState, parsed: Parsed[ChatBody], param: str = "messages"
) -> tuple[Generation, AnswerPlan]:
    """The generation of a conversation, not yet submitted, and how to read its answer.

    `param` is what the client calls its messages.
    """
    plan = answer_plan(parsed.body, state)
    prompt = await chat_prompt(state, parsed, param, plan.tools)
    plan = with_prompt(plan, state.tokenizer, prompt.token_ids)
    params, by_tools = with_plan(parsed.params, plan, state.tokenizer, template_of(state))
    field = "tools" if by_tools else wish_field(parsed.body) or "response_format"
    await check_wish(state, params.structured_outputs, field)
    return make_generation(state, [prompt], replace(parsed, params=params), param), plan


async def chat_prompt(
    state: ServerState, parsed: Parsed[ChatBody], param: str, tools: ToolPlan | None = None
) -> Prompt:
    prompt = await state.run(
        parsed.size,
        lambda: make_prompt(
            state.tokenizer,
            parsed.body,
            chat_template=state.settings.chat_template,
            trust_special_tokens=state.settings.trust_special_tokens,
            tools=tools,
        ),
    )
    finish_prompt(prompt, parsed.body, state, param)
    return prompt


def make_prompt(
    tokenizer: Tokenizer,
    body: ChatBody,
    *,
    chat_template: str | None,
    trust_special_tokens: bool,
    tools: ToolPlan | None = None,
) -> Prompt:
    """Render and tokenise; runs in a worker thread for big bodies. Raises RequestError."""
    if not body.messages:
        raise refuse("messages must hold at least one message", "messages", code="missing_field")
    continue_final = bool(body.continue_final_message)
    add_prompt = not continue_final if body.add_generation_prompt is None else body.add_generation_prompt
    messages, in_template = body.messages, "tools" in (chat_template or tokenizer.chat_template or "")
    if tools is not None and not in_template:
        messages = with_tool_instructions(messages, tools)
    token_ids = render_chat(
        tokenizer,
        messages,
        add_generation_prompt=add_prompt,
        continue_final_message=continue_final,
        chat_template=chat_template,
        trust_special_tokens=trust_special_tokens,
        tools=tools.tools if tools is not None and in_template else None,
        template_kwargs=body.chat_template_kwargs,
    )
    return Prompt(token_ids)


class ChatRenderer(OpenAiErrors):
    """The `chat.completion` object, whole or in chunks."""

    def __init__(
        self, tokenizer: Tokenizer, generation: Generation, base: dict[str, Any], body: ChatBody, plan: AnswerPlan
    ) -> None:
        self._plan = plan
        self._readers: dict[int, AnswerReader] = {}
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
        reader = self._readers.setdefault(update.choice.index, self._plan.reader())
        parts = reader.push(update.text, last=update.finish_reason is not None)
        deltas: list[dict[str, Any]] = [{"reasoning_content": parts.reasoning}] if parts.reasoning else []
        deltas += [{"content": parts.content}] if parts.content else []
        deltas += [{"tool_calls": [call]} for call in call_deltas(reader, parts.calls)]
        for delta in deltas or ([{"content": ""}] if logprobs else []):
            frames.append(self._chunk([self._delta(update.choice, delta, logprobs)]))
            logprobs = None  # they belong to the tokens of all parts, and are told once
        if update.finish_reason is not None:
            end = self._delta(update.choice, {}, None, reader.finish_reason(update.finish_reason))
            end["stop_reason"] = update.stop_reason
            if update.choice.score is not None:
                end["score"] = update.choice.score
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
        reader = self._plan.reader()
        parts = reader.push(output.text, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
        if self._plan.splits_thoughts:
            message["reasoning_content"] = parts.reasoning or None
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = whole_calls(reader, parts.calls)
        assert choice.finish_reason is not None
        score = {} if choice.score is None else {"score": choice.score}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(self._tokenizer, output.logprobs) if self._with_logprobs else None,
            "finish_reason": reader.finish_reason(choice.finish_reason),
            "stop_reason": output.stop_reason,
            **score,
        }

    def _delta(
        self,
        choice: Choice,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        content = {**self._base, "object": "chat.completion.chunk", "choices": choices}
        if self._include_usage:
            content["usage"] = None
        return frame(content)
