"""POST /v1/completions: prompts of a body, and the JSON of its answer."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from octavo.request import FinishReason, SamplingParams
from octavo.server.generation import Choice, Generation, Prompt, Update
from octavo.server.intake import base_fields, finish_prompt, make_generation, read_generation, respond
from octavo.server.logprobs import CompletionLogprobs, prompt_logprobs
from octavo.server.schema import CompletionBody, check_num_choices, prompts_of
from octavo.server.sse import DONE, GenerationResponse, OpenAiErrors, frame
from octavo.server.state import ServerState
from octavo.server.structured import check_wish, wish_field
from octavo.server.usage import last_chunk, usage_of
from octavo.text.tokenizer import Tokenizer


async def create_completion(request: Request, state: ServerState) -> GenerationResponse:
    parsed = await read_generation(request, state, CompletionBody)
    body, skip_special = parsed.body, parsed.params.skip_special_tokens
    prompts = await state.run(parsed.size, lambda: make_prompts(state.tokenizer, body, skip_special))
    check_num_choices(len(prompts), parsed.params.num_sequences)
    for prompt in prompts:
        finish_prompt(prompt, body, state, "prompt")
        if body.echo and prompt.num_truncated:
            prompt.text = state.tokenizer.decode(prompt.token_ids, skip_special_tokens=skip_special)
    await check_wish(state, parsed.params.structured_outputs, wish_field(body) or "structured_outputs")
    generation = make_generation(state, prompts, parsed, "prompt")
    renderer = CompletionRenderer(state.tokenizer, generation, base_fields(state, "cmpl-"), body)
    return respond(state, generation, renderer, body)


def make_prompts(tokenizer: Tokenizer, body: CompletionBody, skip_special_tokens: bool) -> list[Prompt]:
    """Tokenise; runs in a worker thread for big bodies. Raises RequestError."""
    prompts = []
    for given in prompts_of(body):
        if isinstance(given, str):
            prompts.append(Prompt(tokenizer.encode(given), given))
        else:
            text = tokenizer.decode(given, skip_special_tokens=skip_special_tokens) if body.echo else ""
            prompts.append(Prompt(given, text))
    return prompts


class CompletionRenderer(OpenAiErrors):
    """The `text_completion` object, whole or in chunks."""

    def __init__(
        self, tokenizer: Tokenizer, generation: Generation, base: dict[str, Any], body: CompletionBody
    ) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._base = {**base, "object": "text_completion"}
        self._echo = bool(body.echo)
        self._params: SamplingParams = generation.params
        self._show_prompt_logprobs = body.prompt_logprobs is not None
        self._include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def opening(self) -> list[bytes]:
        return []

    def chunks(self, update: Update) -> list[bytes]:
        text = update.text
        choice = update.choice
        first = choice.index not in self._logprobs
        logprobs = self._logprobs_of(choice)
        if first and self._echo:
            text = choice.prompt.text + text
        shown = None
        if self._params.logprobs is not None:
            logprobs.add(update.logprobs, self._echoed(choice) + choice.output.text)
            shown = logprobs.take()
        if not text and update.finish_reason is None and not (shown and shown["tokens"]):
            return []
        return [self._chunk([self._choice(choice, text, shown, update.finish_reason, update.stop_reason)])]

    def closing(self) -> list[bytes]:
        last = last_chunk({**self._base, "choices": []}, self._generation, with_usage=self._include_usage)
        return [*map(frame, last), DONE]

    def full(self) -> dict[str, Any]:
        choices = []
        for choice in self._generation.answers():
            output = choice.output
            text = self._echoed(choice) + output.text
            shown = None
            if self._params.logprobs is not None:
                logprobs = self._logprobs_of(choice)
                logprobs.add(output.logprobs, text)
                shown = logprobs.take()
            made = self._choice(choice, text, shown, choice.finish_reason, output.stop_reason)
            if self._show_prompt_logprobs:
                made["prompt_logprobs"] = prompt_logprobs(self._tokenizer, choice.prompt.logprobs)
            choices.append(made)
        made = {**self._base, "choices": choices, "usage": usage_of(self._generation)}
        if self._generation.extension is not None:
            made["octavo"] = self._generation.extension
        return made

    def _echoed(self, choice: Choice) -> str:
        return choice.prompt.text if self._echo else ""

    def _logprobs_of(self, choice: Choice) -> CompletionLogprobs:
        """The builder of this choice; its first use puts the echoed prompt in."""
        found = self._logprobs.get(choice.index)
        if found is None:
            found = self._logprobs[choice.index] = CompletionLogprobs(self._tokenizer, len(self._echoed(choice)))
            if self._echo and self._params.logprobs is not None:
                found.add_prompt(choice.prompt.token_ids, choice.prompt.logprobs, choice.prompt.text)
        return found

    def _choice(
        self,
        choice: Choice,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            **({"score": choice.score} if choice.score is not None and finish_reason is not None else {}),
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        content = {**self._base, "choices": choices}
        if self._include_usage:
            content["usage"] = None
        return frame(content)
