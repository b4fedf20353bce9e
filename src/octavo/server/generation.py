"""One generation request on its way through the engine: prompts in, text updates of its choices out."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.errors import EngineError, OctavoError, RequestError
from octavo.events import OutputEvent
from octavo.plan import TokenLogprobs
from octavo.ranking import rank
from octavo.request import FinishReason, SamplingParams
from octavo.server.client import EngineClient, RequestHandle
from octavo.server.failures import ClientGoneError
from octavo.server.metrics import ServerMetrics
from octavo.server.wire import GenerationError, SubmitSpec
from octavo.text.output import SequenceOutput
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Prompt:
    """One prompt and what the engine said about it. `text` is what `echo` shows."""

    token_ids: list[int]
    text: str = ""
    num_truncated: int = 0
    num_cached: int = 0
    embedding: bytes = b""  # with pooling: float32, little-endian
    first_token_seconds: float | None = None  # since the request arrived
    # Entry i belongs to position i + 1; complete when the first token of the answer arrives.
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Choice:
    """One answer. `index` counts over all prompts: prompt number * samples + sample (with best_of, until ranked)."""

    index: int
    prompt: Prompt
    output: SequenceOutput
    num_tokens: int = 0
    score: float | None = None  # of a beam search
    num_shared: int = 0  # prompt tokens whose KV came from a sibling
    first_token_at: float | None = None
    last_token_at: float | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Update:
    """News of one choice: text (maybe empty while a stop string is possible), tokens, and the end."""

    choice: Choice
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Generation:
    """The prompts of one HTTP request, n samples each, as one submission. Always `close()` it."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        tenant: str = "",
        priority: int = 0,
        pin_seconds: float | None = None,
        param: str = "prompt",
    ) -> None:
        """`param` is what the client calls the prompt: refusals name it."""
        self._param = param
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics
        self.prompts = list(prompts)
        self.params = params
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.pin_seconds = pin_seconds
        self._priority = priority
        self._arrival = time.perf_counter()
        self._submitting: asyncio.Future[RequestHandle] | None = None
        self._handle: RequestHandle | None = None
        self._gone = False
        self._failure: GenerationError | None = None
        self.error: BaseException | None = None
        self.seconds: float | None = None  # from arrival to the end; None while it lasts
        self.extension: dict[str, Any] | None = None  # the `octavo` object of the answer, if asked for
        self.choices = [
            Choice(p * params.num_outputs + s, prompt, SequenceOutput(tokenizer, params, prompt.token_ids))
            for p, prompt in enumerate(self.prompts)
            for s in range(params.num_outputs)
        ]
        # The engine's ids are made here, whatever a client calls its request: they never collide.
        self._first_choice = {uuid.uuid4().hex: p * params.num_outputs for p in range(len(self.prompts))}

    async def submit(self) -> None:
        """Returns once the engine has admitted every prompt. Raises RequestError, EngineError, ClientGoneError."""
        eos = tuple(sorted(self._tokenizer.eos_token_ids))
        specs = [
            SubmitSpec(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                params=self.params,
                eos_token_ids=eos,
                cache_salt=self.cache_salt,
                tenant=self.tenant,
                pin_seconds=self.pin_seconds,
                priority=self._priority,
            )
            for request_id, prompt in zip(self._first_choice, self.prompts, strict=True)
        ]
        try:
            self._submitting = asyncio.ensure_future(self._client.submit(specs))
            self._handle = await self._submitting
        except RequestError as e:
            if e.param == "prompt":
                e.param = self._param
            raise
        except asyncio.CancelledError:
            if self._gone:
                raise ClientGoneError("the client closed the connection") from None
            raise
        self._handle.watch_overflow(self.client_gone)
        self._metrics.prompt_tokens.inc(sum(len(p.token_ids) for p in self.prompts))
        if self._gone:
            self.client_gone()

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """What the engine calls the prompts."""
        return tuple(self._first_choice)

    async def stories(self) -> list[dict[str, Any] | None]:
        """What happened to each prompt in the engine, so far. Raises EngineError."""
        return await self._client.explain(self.engine_ids)

    @property
    def status(self) -> str:
        """live, finished, refused (a 4xx), failed, or aborted (the client left)."""
        if self.seconds is None:
            return "live"
        if self.done:
            return "finished"
        if self.error is None:
            return "aborted"
        return "refused" if isinstance(self.error, RequestError) else "failed"

    @property
    def elapsed(self) -> float:
        """Seconds since the arrival, or from it to the end."""
        return time.perf_counter() - self._arrival if self.seconds is None else self.seconds

    @property
    def admitted(self) -> bool:
        return self._handle is not None

    @property
    def done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def answers(self) -> list[Choice]:
        """The choices to show at the end: of each prompt's samples the n best, best first where they were ranked."""
        n, num_samples = self.params.n, self.params.num_outputs
        if num_samples == n:
            return self.choices
        best: list[Choice] = []
        for first in range(0, len(self.choices), num_samples):
            samples = self.choices[first : first + num_samples]
            ranked = rank([choice.output.logprobs for choice in samples])[:n]
            best += [replace(samples[i], index=len(best) + place) for place, i in enumerate(ranked)]
        return best

    async def updates(self) -> list[Update]:
        """Waits for news: one Update per choice that has any. Raises EngineError, ClientGoneError."""
        assert self._handle is not None and not self.done
        found: dict[int, Update] = {}
        while not found:
            if self._failure is not None:
                raise self._failure
            events = await self._handle.next_events()
            if self._gone:
                raise ClientGoneError("the client closed the connection")
            try:
                for event in events:
                    self._take(event, found)
            except GenerationError as e:
                self._failure = e  # what came before it is handed out first
        return list(found.values())

    def _take(self, event: OutputEvent, found: dict[int, Update]) -> None:
        choice = self.choices[self._first_choice[event.request_id] + event.index]
        if choice.finish_reason is not None:
            return  # came in while the engine was being told of the stop string
        if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise GenerationError(event.error or "the engine gave the request up")
        prompt = choice.prompt
        if event.index == 0:
            prompt.logprobs.extend(event.prompt_logprobs)
            if event.num_cached > prompt.num_cached:
                self._metrics.cached_tokens.inc(event.num_cached - prompt.num_cached)
                prompt.num_cached = event.num_cached
        choice.num_shared, choice.score = event.num_shared, event.score
        if event.embedding is not None:
            prompt.embedding = event.embedding
        self._observe(choice, len(event.token_ids))
        try:
            delta = choice.output.push(event)
        except OctavoError:
            raise
        except Exception as e:  # a fault of the text layer costs this request, nobody else's
            logger.exception("the text of a request could not be decoded")
            raise GenerationError(f"the answer could not be decoded ({type(e).__name__})") from None
        if event.token_ids or delta.text or delta.finish_reason is not None:
            update = found.setdefault(choice.index, Update(choice))
            update.text += delta.text
            update.token_ids.extend(delta.token_ids)
            update.logprobs.extend(delta.logprobs or ())
            update.finish_reason = delta.finish_reason
            update.stop_reason = delta.stop_reason
        if delta.finish_reason is not None:
            if delta.stopped_by_text:
                self._client.finish_sequence(event.request_id, event.index)
            self._finish(choice, event.request_id, delta.finish_reason)

    def _observe(self, choice: Choice, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.perf_counter()
        if choice.last_token_at is not None:
            self._metrics.itl.observe((now - choice.last_token_at) / num_tokens)
        elif choice.index == self._first_choice_of(choice):
            choice.prompt.first_token_seconds = now - self._arrival
            self._metrics.ttft.observe(now - self._arrival)
        if choice.first_token_at is None:
            choice.first_token_at = now
        choice.last_token_at = now
        choice.num_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def _first_choice_of(self, choice: Choice) -> int:
        return choice.index - choice.index % self.params.num_outputs

    def _finish(self, choice: Choice, request_id: str, reason: FinishReason) -> None:
        choice.finish_reason = reason
        first = self._first_choice[request_id]
        reasons = {c.finish_reason for c in self.choices[first : first + self.params.num_outputs]}
        if None not in reasons:
            assert self._handle is not None
            self._handle.finished(request_id)
            # Samples may end differently; the prompt counts as cut if any of them was.
            worst = FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP
            self._metrics.finished(worst, time.perf_counter() - self._arrival)
            self._metrics.answered(
                len(choice.prompt.token_ids),
                [
                    (c.num_tokens, (c.last_token_at or 0.0) - (c.first_token_at or 0.0))
                    for c in self.choices[first : first + self.params.num_outputs]
                ],
            )

    def client_gone(self) -> None:
        """The connection closed: end the request now. `updates` raises ClientGoneError from here on."""
        self._gone = True
        if self._submitting is not None:
            self._submitting.cancel()  # no effect once it is done
        if self._handle is not None and not self._handle.closed:
            self._handle.fail(ClientGoneError("the client closed the connection"))
            self._close(FinishReason.ABORT)

    def close(self, error: BaseException | None = None) -> None:
        """Release everything; unfinished prompts are aborted and counted (`error`: why they did not finish)."""
        self.error = error
        self._close(FinishReason.ERROR if isinstance(error, EngineError) else FinishReason.ABORT)
        if self.seconds is None:
            self.seconds = time.perf_counter() - self._arrival

    def _close(self, reason: FinishReason) -> None:
        if self._handle is not None and not self._handle.closed:
            for _ in range(len(self._handle.open_ids)):
                self._metrics.finished(reason, time.perf_counter() - self._arrival)
            self._handle.close()
