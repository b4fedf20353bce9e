"""Drives an engine over a list of requests in this process: feeding, text, results. Used by LLM and `octavo run`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.errors import QueueFullError
from octavo.plan import TokenLogprobs
from octavo.ranking import rank
from octavo.request import FinishReason, Request, SamplingParams
from octavo.results import CompletionOutput, LogprobsOfPosition, RequestOutput, logprobs_of

if TYPE_CHECKING:
    from octavo.engine import Engine
    from octavo.events import OutputEvent
    from octavo.text.output import SequenceOutput
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo")


class TokenOutput:
    """The output of a sequence when there is no tokenizer: ids only, empty text."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def push(self, event: OutputEvent) -> None:
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs or ())
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason


@dataclass(slots=True)
class Job:
    """One request on its way through the engine, and what came of it so far."""

    request: Request
    prompt: str | None
    outputs: list[SequenceOutput | TokenOutput]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    embedding: bytes | None = None
    error: str | None = None
    num_shared: dict[int, int] = field(default_factory=dict)  # by sample
    scores: dict[int, float | None] = field(default_factory=dict)  # by result of a beam search

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    def answers(self) -> list[SequenceOutput | TokenOutput]:
        """The outputs to show: with best_of the n best of them, best first."""
        params = self.request.params
        if params.num_outputs == params.n:
            return self.outputs
        return [self.outputs[i] for i in rank([output.logprobs for output in self.outputs])[: params.n]]


@dataclass(frozen=True, slots=True)
class News:
    """What one step brought for one sequence."""

    job: Job
    index: int
    num_tokens: int
    text: str


class OfflineDriver:
    """Feeds jobs to the engine as its queue takes them and turns its events into text. One run at a time."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer

    def job(self, request: Request, prompt: str | None) -> Job:
        outputs = [self._output(request.params, request.prompt_token_ids) for _ in range(request.params.num_outputs)]
        return Job(request, prompt, outputs)

    def _output(self, params: SamplingParams, prompt_token_ids: list[int]) -> SequenceOutput | TokenOutput:
        if self.tokenizer is None:
            return TokenOutput()
        from octavo.text.output import SequenceOutput

        return SequenceOutput(self.tokenizer, params, prompt_token_ids)

    def steps(self, jobs: Iterable[Job]) -> Generator[list[News], None, None]:
        """Runs the jobs to their end; yields the news of each engine step, an empty list where there is none.

        Leaving the loop early (break, exception, close) aborts what is unfinished and leaves the engine usable.
        """
        pending = deque(jobs)
        live: dict[str, Job] = {}
        try:
            while pending or live:
                self._feed(pending, live)
                yield [news for event in self.engine.step() if (news := self._deliver(event, live))]
        finally:
            for request_id in live:
                self.engine.abort(request_id)

    def _feed(self, pending: deque[Job], live: dict[str, Job]) -> None:
        """Adds jobs until the queue is full; what does not fit yet waits here for the next step."""
        while pending:
            try:
                self.engine.add_request(pending[0].request)
            except QueueFullError:
                if not live:
                    raise
                return
            job = pending.popleft()
            live[job.request.request_id] = job

    def _deliver(self, event: OutputEvent, live: dict[str, Job]) -> News | None:
        job = live.get(event.request_id)
        if job is None:
            return None  # the end of a request that an earlier run aborted
        job.num_shared[event.index] = event.num_shared
        job.scores[event.index] = event.score
        if event.index == 0:
            job.prompt_logprobs.extend(event.prompt_logprobs)
            job.num_cached = max(job.num_cached, event.num_cached)
        output = job.outputs[event.index]
        if output.finish_reason is not None:
            return None
        text = ""
        if isinstance(output, TokenOutput):
            output.push(event)
        else:
            delta = output.push(event)
            text = delta.text
            if delta.stopped_by_text:
                self.engine.finish_sequence(event.request_id, event.index)
        job.embedding = event.embedding or job.embedding
        job.error = event.error or job.error
        if event.error is not None:
            logger.warning("request %s ended with an error: %s", event.request_id, event.error)
        if job.finished:
            del live[event.request_id]
        return News(job, event.index, len(event.token_ids), text)

    # ------------------------------------------------------------------ results

    def result(self, job: Job) -> RequestOutput:
        """The job in vLLM's shape; may be called before it has finished."""
        params = job.request.params
        prompt_logprobs: list[LogprobsOfPosition | None] | None = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._logprobs(entry) for entry in job.prompt_logprobs)]
        return RequestOutput(
            request_id=job.request.request_id,
            prompt=job.prompt,
            prompt_token_ids=list(job.request.prompt_token_ids),
            outputs=[
                self._completion(index, output, params, job.scores.get(index))
                for index, output in enumerate(job.answers())
            ],
            prompt_logprobs=prompt_logprobs,
            finished=job.finished,
            num_cached_tokens=job.num_cached,
            num_shared_tokens=sum(job.num_shared.values()),
        )

    def _completion(
        self, index: int, output: SequenceOutput | TokenOutput, params: SamplingParams, score: float | None
    ) -> CompletionOutput:
        with_logprobs = params.logprobs is not None
        with_sum = with_logprobs or score is not None
        return CompletionOutput(
            index=index,
            text=output.text,
            token_ids=list(output.token_ids),
            cumulative_logprob=sum(entry.logprob for entry in output.logprobs) if with_sum else None,
            logprobs=[self._logprobs(entry) for entry in output.logprobs] if with_logprobs else None,
            finish_reason=output.finish_reason.value if output.finish_reason else None,
            stop_reason=output.stop_reason,
            score=score,
        )

    def _logprobs(self, entry: TokenLogprobs) -> LogprobsOfPosition:
        ids = (entry.token_id, *(token_id for token_id, _ in entry.top))
        return logprobs_of(entry, {i: self.tokenizer.token_text(i) for i in ids} if self.tokenizer else {})
