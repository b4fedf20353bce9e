"""The engine: plan, execute, commit."""

from __future__ import annotations

import dataclasses
import logging
import random
from dataclasses import dataclass
from typing import Any

from octavo.backends.base import Backend
from octavo.beams import check_limits
from octavo.clock import Clock, WallClock
from octavo.config import EngineConfig
from octavo.constraint import Grammar, GrammarCompiler, StructuredOutputsParams
from octavo.errors import ContextLengthError, EngineError, RequestError
from octavo.events import OutputEvent
from octavo.explain import Recorder
from octavo.kv.sizing import beam_tokens_that_fit, check_fits
from octavo.kv.trees import cache_trees
from octavo.plan import StepPlan, StepResult
from octavo.request import MAX_SEED, FinishReason, Request, SamplingParams
from octavo.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_SALT_LEN = 4096
MAX_PIN_SECONDS = 30 * 86_400
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Sequences and blocks now, then totals since the start (see `counters.Counters`)."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int  # cached ones included: they are reused on demand
    num_cached_blocks: int
    num_steps: int
    num_prompt_tokens: int  # put through the model, again after a preemption
    num_generated_tokens: int
    num_query_tokens: int  # prompt tokens looked up in the prefix cache
    num_hit_tokens: int  # of these, found
    num_readmission_hit_tokens: int
    num_sibling_hit_tokens: int
    num_preemptions: int
    num_lost_tokens: int  # KV given up by preemptions; num_readmission_hit_tokens of it came back
    queue_seconds: float
    num_finished: dict[FinishReason, int]  # requests
    observed: dict[str, Any] | None  # explain.Recorder.totals(); None unless the engine is observed


class Engine:
    """One model, one KV pool, one loop. Not thread-safe: whoever owns it calls it from one thread."""

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        *,
        clock: Clock | None = None,
        seed: int | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`seed` makes the seeds drawn for requests without one repeatable. `grammars`: for structured output."""
        self.config = config
        self.backend = backend
        self.scheduler = Scheduler(config)
        self._clock: Clock = WallClock() if clock is None else clock
        self._random = random.Random(seed)
        self._recorder: Recorder | None = None
        self.grammars = grammars
        backend.allocate_kv(config.num_blocks)

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        cache_salt: str = "",
        tenant: str = "",
        priority: int = 0,
        pin_seconds: float | None = None,
        compile_grammar: bool = True,
    ) -> Request:
        """Check everything about a request that needs the model or the pool, and fill in what is open.

        `max_tokens` becomes a number and is clamped to the context, a missing seed is drawn. Without
        `compile_grammar` a grammar that is not known yet is left to the caller. Raises
        RequestError, ContextLengthError (prompt leaves no room), NeverFitsError (pool too small).
        """
        vocab_size = self.backend.capabilities.vocab_size
        _check_token_ids("prompt", prompt_token_ids, vocab_size)
        _check_token_ids("logit_bias", list(params.logit_bias), vocab_size)
        _check_token_ids("stop_token_ids", list(params.stop_token_ids), vocab_size)
        if len(cache_salt) > MAX_SALT_LEN:
            raise RequestError(f"cache_salt has more than {MAX_SALT_LEN} characters", param="cache_salt")
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError(f"priority must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}", param="priority")
        num_prompt = len(prompt_token_ids)
        room = self.config.max_model_len - num_prompt
        if room < 0 or (room == 0 and params.max_tokens != 0):
            raise ContextLengthError(num_prompt, self.config.max_model_len)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._check_fits(num_prompt, max_tokens, params)
        if pin_seconds is not None:
            self._check_pin(num_prompt, pin_seconds)
        if params.use_beam_search and params.num_sequences == 1:
            params = dataclasses.replace(
                params, use_beam_search=False, length_penalty=1.0, early_stopping=False, temperature=0.0
            )
        if params.use_beam_search:
            fitting = beam_tokens_that_fit(
                num_prompt, params.num_sequences, self.config.num_blocks, self.config.block_size
            )
            max_tokens = min(max_tokens, fitting)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed & MAX_SEED
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            max_tokens=max_tokens,
            seed=seed,
            eos_token_ids=eos_token_ids,
            cache_salt=cache_salt,
            tenant=tenant,
            priority=priority,
            pin_seconds=pin_seconds,
            arrival=self._clock.now(),
            grammar=self._grammar(params.structured_outputs, compile_grammar),
        )
        self._check_beams(request)
        return request

    def _check_beams(self, request: Request) -> None:
        if request.params.use_beam_search:
            max_width = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
            check_limits(request, vocab_size=self.backend.capabilities.vocab_size, max_width=max_width)

    def _grammar(self, wish: StructuredOutputsParams | None, compile_it: bool) -> Grammar | None:
        if wish is None:
            return None
        if self.grammars is None:
            raise RequestError(
                "structured output needs a tokenizer, which this model lacks", param="structured_outputs"
            )
        return self.grammars.compile(wish) if compile_it else self.grammars.find(wish)

    def _check_pin(self, num_prompt: int, pin_seconds: float) -> None:
        """RequestError if the prompt's prefix can never be pinned."""
        num_full, limits = num_prompt // self.config.block_size, self.scheduler.tables.retention
        most = limits.max_pinned if limits.quota is None else min(limits.max_pinned, limits.quota)
        problem = None
        if not (0 < pin_seconds <= MAX_PIN_SECONDS):
            problem = f"must be a number of seconds above 0 and at most {MAX_PIN_SECONDS}"
        elif not self.config.enable_prefix_caching:
            problem = "needs the prefix cache, which is off"
        elif num_full == 0:
            problem = f"needs a prompt of at least one KV block ({self.config.block_size} tokens)"
        elif num_full > most:
            problem = f"would take {num_full} KV blocks, but pins may hold {most} of {self.config.num_blocks}"
        if problem is not None:
            raise RequestError(f"cache_pin {problem}", param="cache_pin", code="invalid_value")

    def cache_report(self, tenant: str | None = None, limit: int = 100) -> dict[str, Any]:
        """What the prefix cache holds, as trees, and what is pinned: of one tenant, or all (kv/trees.py)."""
        return cache_trees(self.scheduler.tables, self._clock.now(), tenant=tenant, limit=limit)

    def unpin(self, pin_id: str, tenant: str | None = None) -> bool:
        """Release a pin; False if there is none such (of this tenant)."""
        return self.scheduler.tables.retention.unpin(pin_id, tenant)

    def _check_fits(self, num_prompt: int, max_tokens: int, params: SamplingParams) -> None:
        check_fits(num_prompt, max_tokens, self.config.num_blocks, self.config.block_size, params.num_sequences)

    def add_request(self, request: Request) -> None:
        """Queue it. QueueFullError; RequestError if the id belongs to a live request."""
        assert request.grammar is not None or request.params.structured_outputs is None
        num_prompt = len(request.prompt_token_ids)
        if num_prompt + min(1, request.max_tokens) > self.config.max_model_len:
            raise ContextLengthError(num_prompt, self.config.max_model_len)
        self._check_fits(num_prompt, request.max_tokens, request.params)
        self._check_beams(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Free a request's blocks at once; its ABORT events come with the next step. Unknown ids: no-op."""
        self.scheduler.abort(request_id)

    def finish_sequence(self, request_id: str, index: int) -> None:
        """The text layer found a stop string: end this sequence now, with no further events."""
        self.scheduler.finish_sequence(request_id, index)

    def observe(self, num_recent: int = 512) -> None:
        """From now on keep what `explain` tells, for live requests and the `num_recent` last ones."""
        assert not self.scheduler.requests and self._recorder is None, "observe() before the first request, once"
        self._recorder = Recorder(self._clock, self.scheduler.tables, num_recent)
        self.scheduler.line.observer = self._recorder

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """What happened to a live or recent request (see explain.Story); None if unknown or not observed."""
        return None if self._recorder is None else self._recorder.explain(request_id)

    def step(self) -> list[OutputEvent]:
        """Plan, execute, commit. A fault ends the requests of the step with ERROR events; the rest live on."""
        try:
            plan = self.scheduler.plan(self._clock.now())
            if not plan.rows:
                return self.scheduler.take_pending()
            result = self.backend.execute(plan)
            _check_result(plan, result)
            return self.scheduler.commit(plan, result)
        except Exception as exc:
            logger.exception("a step failed; its requests end with an error")
            return self.scheduler.fail_in_flight(f"the engine failed in a step: {type(exc).__name__}: {exc!s:.200}")

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def stats(self) -> EngineStats:
        scheduler, pool, counters = self.scheduler, self.scheduler.tables.pool, self.scheduler.counters
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=len(pool.cache),
            num_steps=counters.steps,
            num_prompt_tokens=counters.prompt_tokens_computed,
            num_generated_tokens=counters.generated_tokens,
            num_query_tokens=counters.query_tokens,
            num_hit_tokens=counters.hit_tokens,
            num_readmission_hit_tokens=counters.readmission_hit_tokens,
            num_sibling_hit_tokens=counters.sibling_hit_tokens,
            num_preemptions=counters.preemptions,
            num_lost_tokens=counters.lost_tokens,
            queue_seconds=counters.queue_seconds,
            num_finished=dict(counters.finished),
            observed=None if self._recorder is None else self._recorder.totals(),
        )


def _check_token_ids(param: str, token_ids: list[int], vocab_size: int) -> None:
    """Types and range at once for the usual case; the loop only finds the culprit."""
    if set(map(type, token_ids)) <= {int} and (not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)):
        return
    for i, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param}: entry {i} is not a token id from 0 to {vocab_size - 1}", param=param, code="invalid_token_id"
            )


def _check_result(plan: StepPlan, result: StepResult) -> None:
    """A backend that breaks the contract fails the step, before anything enters the books."""
    if len(result.rows) != len(plan.rows):
        raise EngineError(f"{len(result.rows)} results for {len(plan.rows)} rows")
    for row, out in zip(plan.rows, result.rows, strict=True):
        if out.error is None and (
            (out.token_id is None) != (row.sample is None)
            or len(out.scores) != len(row.score_ids)
            or len(out.forks) != len(row.forks)
            or (out.pooled is None) != (row.pool is None)
            or any(fork.error is None and fork.token_id is None for fork in out.forks)
        ):
            raise EngineError("the result of a row does not match what was asked for")
