"""Decides what each step computes: token budget, chunking, admission, preemption, and when sequences end.

There are no prefill and decode phases: a step gives a sequence some tokens so that `num_computed`
catches up with `num_known`; when it does, the step draws one more token.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter

from octavo.beams import BeamSearch, Hypothesis, move, num_candidates
from octavo.config import EngineConfig
from octavo.errors import QueueFullError, RequestError
from octavo.events import Observer, OutputEvent, WaitReason
from octavo.foresight import Foresight
from octavo.kv.sizing import blocks_for
from octavo.kv.tables import BlockTables, Hits
from octavo.plan import PlanRow, PoolSpec, RowResult, SampleSpec, StepPlan, StepResult, TokenLogprobs
from octavo.policies import Preemption, admission_order
from octavo.request import MAX_SAMPLES, FinishReason, Request, Sequence, SequenceStatus

logger = logging.getLogger(__name__)

_ORDER = attrgetter("order")
_RUNNING = SequenceStatus.RUNNING
_WAITING = SequenceStatus.WAITING
# A request with several samples is counted once, by the gravest of their reasons.
_GRAVITY = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


@dataclass(slots=True)
class Counters:
    """Totals since the start; none ever goes down.

    Hits are counted where they save a request's own work for the first time: hits after a preemption
    and what a sample takes from a sibling are counted apart, so hit_tokens / query_tokens is the rate at
    which *other* requests' work was reused. Requests that want prompt logprobs look nothing up.
    """

    steps: int = 0
    prompt_tokens_computed: int = 0  # put through the model, again after a preemption
    generated_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    readmission_hit_tokens: int = 0
    sibling_hit_tokens: int = 0
    preemptions: int = 0
    lost_tokens: int = 0  # computed tokens given up by preemptions; readmission_hit_tokens of them came back
    queue_seconds: float = 0.0  # from arrival to first admission, summed over requests
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


class _Draft:
    """A step while it is being planned: rows in order, and the tokens that may still be given out.

    `forks`: the samples that begin with the token which the row of their sibling draws.
    """

    __slots__ = ("budget", "forks", "rows")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[Sequence, PlanRow] = {}
        self.forks: dict[Sequence, list[Sequence]] = {}

    def add(self, seq: Sequence, row: PlanRow) -> None:
        self.rows[seq] = row
        self.budget -= len(row.token_ids)

    def drop(self, seq: Sequence) -> None:
        row = self.rows.pop(seq, None)
        self.forks.pop(seq, None)
        if row is not None:
            self.budget += len(row.token_ids)


class Scheduler:
    """Owns the sequences and the KV books. `plan` and `commit` alternate; everything else in between.

    `waiting` and `running` are sorted by `Sequence.order`, so a preempted sequence returns to its own
    place in line, which is before everyone who came later.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tables = BlockTables(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            max_pinned=int(config.num_blocks * config.cache_pin_limit),
            quota=None if config.tenant_cache_quota >= 1 else int(config.num_blocks * config.tenant_cache_quota),
        )
        self.counters = Counters()
        self.observer: Observer | None = None
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.requests: dict[str, list[Sequence]] = {}  # live requests: all their samples
        # A sequence may know one token more than the pool holds: the last one needs no KV.
        self._max_known = min(config.max_model_len, config.num_blocks * config.block_size + 1)
        self._order = admission_order(config.scheduling_policy)
        self._preemption = Preemption(config, self.tables, self._max_known)
        self._foresight = Foresight(config.num_blocks, config.block_size, self._max_known)
        self._next_serial = 0
        self._num_live = 0
        self._in_flight: tuple[Sequence, ...] = ()  # the rows' sequences of the plan not yet committed
        self._forks: dict[Sequence, list[Sequence]] = {}  # its forks
        self._searches: dict[str, BeamSearch] = {}  # of live requests
        self._pending: list[OutputEvent] = []  # events that did not come from a step

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting or self._pending)

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> None:
        """Queue all samples of a request. QueueFullError; RequestError if the id is taken."""
        if request.request_id in self.requests:
            raise RequestError("request_id is already in use", param="request_id", code="duplicate_request_id")
        n = request.params.num_sequences
        limit = self.config.max_num_seqs + self.config.max_num_waiting
        if n > limit:
            name = "n" if n == request.params.n else "best_of"
            raise RequestError(f"{name} must be at most {limit} on this server", param=name, code="invalid_value")
        if self._num_live + n > limit:
            raise QueueFullError(len(self.waiting))
        serial = self._next_serial
        self._next_serial += 1
        rank = self._order(request, serial)
        if request.params.use_beam_search:
            self._searches[request.request_id] = search = BeamSearch(request)
            samples = list(search.sequences)
        else:
            samples = [Sequence(request, index) for index in range(n)]
        for seq in samples:
            seq.order = (rank, serial, seq.index)
            bisect.insort(self.waiting, seq, key=_ORDER)
        self.requests[request.request_id] = samples
        self._num_live += n
        if self.observer is not None:
            self.observer.queued(samples)

    def abort(self, request_id: str) -> None:
        """End all samples now; their last events come with the next step. Unknown ids are ignored."""
        for seq in self.requests.get(request_id, ()):
            if not seq.finished:
                self._finish(seq, FinishReason.ABORT)
                self._pending += _terminal_events([seq])

    def finish_sequence(self, request_id: str, index: int) -> None:
        """End one sample now, as its text asked for it; it has no further events."""
        samples = self.requests.get(request_id, [])
        if request_id in self._searches:
            return  # beams tell nothing before the search is settled, so nobody can have found a stop in them
        if index < len(samples) and not samples[index].finished:
            self._finish(samples[index], FinishReason.STOP)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        (self.running if seq.status is _RUNNING else self.waiting).remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        self.tables.free(seq, forget=reason is FinishReason.ERROR)
        self._num_live -= 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._foresight.lengths.observe(seq.num_generated)
        if self.observer is not None:
            self.observer.finished(seq)
        samples = self.requests[seq.request.request_id]
        if all(s.finished for s in samples):
            del self.requests[seq.request.request_id]
            self._searches.pop(seq.request.request_id, None)
            reasons = {s.finish_reason for s in samples}
            self.counters.finished[next(r for r in _GRAVITY if r in reasons)] += 1

    # ------------------------------------------------------------------ plan

    def plan(self, now: float) -> StepPlan:
        """The next step. `now` in seconds of the clock that also stamped the arrivals."""
        assert not self._in_flight, "plan() before the previous plan was committed"
        draft = _Draft(self.config.max_num_batched_tokens)
        self.tables.retention.tick(now)
        self._plan_running(draft)
        self._admit(draft, now)
        assert draft.rows or not (self.running or self.waiting), "work is waiting, but nothing was planned"
        self._plan_forks(draft)
        self._in_flight = tuple(draft.rows)
        self._forks = draft.forks
        return StepPlan(tuple(draft.rows.values()), self.tables.take_copies())

    def _plan_running(self, draft: _Draft) -> None:
        """Sequences that need one token first, so that long prompts never hold up a running answer."""
        behind = []
        for seq in tuple(self.running):
            if len(seq.token_ids) - seq.num_computed == 1:
                self._advance(seq, draft)
            else:
                behind.append(seq)
        for seq in behind:
            self._advance(seq, draft)

    def _advance(self, seq: Sequence, draft: _Draft) -> None:
        """Give `seq` as many tokens as the budget has; preempt others after it in line for its blocks."""
        if seq.status is not _RUNNING:
            return  # preempted a moment ago, for one before it in line
        most = draft.budget
        if (cap := self.config.long_prefill_token_threshold) and len(self.running) + len(self.waiting) > 1:
            most = min(most, cap)
        end = min(len(seq.token_ids), seq.num_computed + most)
        if end <= seq.num_computed:
            return
        tables = self.tables
        while tables.num_missing(seq, end) > tables.pool.num_free:
            rivals = self._rivals(seq)
            if self._preemption.must_stay(seq, rivals) and tables.retention.yield_one():
                continue
            self._preempt(self._preemption.choose_victim(rivals, seq), draft)
            if seq.status is not _RUNNING:
                return
        tables.grow(seq, end)
        if self.observer is not None and (end - seq.num_computed > 1 or seq.num_computed < seq.num_prompt):
            self.observer.computing(seq, end - seq.num_computed)
        draft.add(seq, self._row(seq, end))

    def _rivals(self, seq: Sequence) -> list[Sequence]:
        """All that run, but for the other beams of the same search: they stand or fall together."""
        if seq.request.request_id not in self._searches:
            return self.running
        return [s for s in self.running if s is seq or s.request is not seq.request]

    def _row(self, seq: Sequence, end: int) -> PlanRow:
        request = seq.request
        token_ids = seq.token_ids
        sample = _sample_spec(seq) if end == len(token_ids) and request.max_tokens > 0 else None
        start = seq.num_computed
        row_ids = token_ids[start:end]
        if request.params.pooling is not None:
            pool = PoolSpec(request.params.pooling, seq.pooled, last=end == seq.num_prompt)
            return PlanRow(row_ids, start, seq.block_ids, pool=pool)
        if not seq.owes_prompt_logprobs or end <= seq.prompt_logprobs_done:
            return PlanRow(row_ids, start, seq.block_ids, sample)
        score_ids = token_ids[start + 1 : min(end + 1, seq.num_prompt)]
        return PlanRow(row_ids, start, seq.block_ids, sample, score_ids, request.params.prompt_logprobs or 0)

    def _admit(self, draft: _Draft, now: float) -> None:
        """From the front of the line, without overtaking, as long as budget, places and blocks last.

        One whose prompt another is computing *rides*: it waits for it without holding up the line, and
        the place and the blocks that it will need stay reserved.
        """
        reason: WaitReason | None = None
        computing = [seq for seq in self.running if seq.num_computed < seq.num_prompt]
        num_riding = num_reserved = 0
        while num_riding < len(self.waiting) and draft.budget > 0:
            seq = self.waiting[num_riding]
            hits = self.tables.find_hits(seq, self._sibling_with_prompt(seq))
            if (num_blocks := self._rides(seq, hits, computing)) is not None:
                num_riding += 1
                num_reserved += num_blocks
                continue
            beside = seq.request.params.num_sequences - 1 if seq.request.request_id in self._searches else 0
            reserved = (num_riding + beside, num_reserved + (beside if seq.request.max_tokens > 1 else 0))
            reason = self._obstacle(seq, hits, reserved)
            if reason is not None and not self._displace_for(seq, hits, reserved, draft):
                if not self.running and self.tables.retention.yield_one():
                    continue  # pins never make the only one wait
                break
            self.waiting.pop(num_riding)
            seq.status = _RUNNING
            computing.append(seq)
            bisect.insort(self.running, seq, key=_ORDER)
            self.tables.take_hits(seq, hits)
            self._count_admission(seq, now)
            self._advance(seq, draft)
        if self.observer is not None:
            for seq in self.waiting[:num_riding]:
                self.observer.held(seq, WaitReason.PREFIX)
            for seq in self.waiting[num_riding : num_riding + 1]:
                self.observer.held(seq, (draft.budget > 0 and reason) or WaitReason.BUDGET)

    def _rides(self, seq: Sequence, hits: Hits, computing: list[Sequence]) -> int | None:
        """How many blocks `seq` will need when the prompt that it waits for is computed; None if it does not wait.

        A sample waits for its sibling, with which it then shares all blocks. Others wait for whoever
        computes at least half of what they lack.
        """
        num_known, block_size = seq.num_known, self.config.block_size
        for other in computing:
            if other.status is not _RUNNING or other.num_computed >= other.num_prompt:
                continue  # preempted since, or a sample that started from its sibling
            if other.request is seq.request:
                return 1
            num_common = self.tables.num_common(seq, other)
            # Its tokens can be hit when their block is full or the whole prompt is there.
            done = min(other.num_prompt, blocks_for(num_common, block_size) * block_size)
            if 2 * (num_common - hits.num_tokens) >= num_known - hits.num_tokens and other.num_computed < done:
                return blocks_for(num_known, block_size) - num_common // block_size
        return None

    def _sibling_with_prompt(self, seq: Sequence) -> Sequence | None:
        """A running sibling, whose blocks hold the prompt: it serves a sample that starts later than the others."""
        if seq.request.params.num_sequences == 1:
            return None
        return next((s for s in self.requests[seq.request.request_id] if s.status is _RUNNING), None)

    def _obstacle(self, seq: Sequence, hits: Hits, reserved: tuple[int, int] = (0, 0)) -> WaitReason | None:
        """What is missing to admit `seq`, beside the reserved (places, blocks): a place, or free blocks for
        all known tokens. None if nothing is.

        All, not only those of the first chunk, and one to spare where others run: otherwise admitting
        one soon preempts another, and they thrash. For the same reason the blocks that all running
        ones are expected to grow by must be there: see `octavo.foresight`.
        """
        if len(self.running) + reserved[0] >= self.config.max_num_seqs:
            return WaitReason.PLACES
        pool = self.tables.pool
        spare = reserved[1] + (1 if self.running else 0)
        needed = self.tables.num_missing(seq, seq.num_known) - len(hits.block_ids)
        needed += pool.num_free_of(hits.block_ids)
        claimed = self._num_claimed()
        if needed + claimed + spare > pool.num_free or not self._preemption.keeps_promises(seq, self.running):
            return WaitReason.BLOCKS
        if self.config.admission == "greedy":
            return None
        expected = self._foresight.expects_room(
            seq, self.running, self.tables, needed, claimed + reserved[1], self._num_forks(seq)
        )
        return None if expected else WaitReason.GROWTH

    def _num_forks(self, seq: Sequence) -> int:
        """Samples that will start when `seq` has computed their prompt."""
        if seq.request.params.num_sequences == 1 or seq.num_generated:
            return 0
        samples = self.requests[seq.request.request_id]
        return sum(s.status is _WAITING and not s.num_generated for s in samples if s is not seq)

    def _num_claimed(self) -> int:
        """Blocks that running sequences which have not caught up still have to take.

        Without a cap on chunks they leave no budget to admit others, so then nobody needs to ask.
        """
        if not self.config.long_prefill_token_threshold:
            return 0
        return sum(max(0, self.tables.num_missing(s, s.num_known)) for s in self.running)

    def _displace_for(self, seq: Sequence, hits: Hits, reserved: tuple[int, int], draft: _Draft) -> bool:
        """Preempt running sequences of lower priority that come after `seq` in line, if that makes room for it."""
        later = [s for s in self.running if self._preemption.may_displace(seq, s)]
        if not later:
            return False
        attainable = self.tables.pool.num_free + self.tables.num_freed_by(later)
        if self.tables.num_missing(seq, seq.num_known) > attainable:
            return False
        while later and self._obstacle(seq, hits, reserved):
            self._preempt(later.pop(), draft)
        return self._obstacle(seq, hits, reserved) is None

    def _plan_forks(self, draft: _Draft) -> None:
        """Samples that wait for their prompt draw their first token from the logits of the sibling that has it.

        As many as there are places and blocks for the step after this one; the others are admitted later.
        """
        pool = self.tables.pool
        for seq, row in tuple(draft.rows.items()):
            if seq not in draft.rows or row.start + len(row.token_ids) != seq.num_known or seq.num_generated > 0:
                continue
            if seq.request.request_id in self._searches:
                self._plan_beams(seq, draft)
                continue
            others = len(self.running) + sum(map(len, draft.forks.values()))
            most = min(self.config.max_num_seqs, self.config.max_num_batched_tokens) - others
            if any(map(self._preemption.is_safe, self.running)):
                most = 0  # admission looks whether the promise to those can be kept; forking does not
            most = min(most, pool.num_free - (others > 1)) if row.sample is not None else MAX_SAMPLES
            siblings = [
                s for s in self.requests[seq.request.request_id] if s.status is _WAITING and not s.num_generated
            ]
            if most > 0 and siblings:
                draft.forks[seq] = siblings[:most]
        for seq, forks in draft.forks.items():
            row = draft.rows[seq]
            if row.sample is not None and seq.request.request_id not in self._searches:
                draft.rows[seq] = replace(row, forks=tuple(_sample_spec(fork) for fork in forks))

    def _plan_beams(self, seq: Sequence, draft: _Draft) -> None:
        """All beams of a search start together; where there is no longer a place for them, it waits again."""
        beams = [s for s in self.requests[seq.request.request_id] if s is not seq]
        others = len(self.running) + sum(map(len, draft.forks.values()))
        if others + len(beams) <= min(self.config.max_num_seqs, self.config.max_num_batched_tokens):
            draft.forks[seq] = beams
        else:
            self._preempt(seq, draft)

    def _count_admission(self, seq: Sequence, now: float) -> None:
        counters = self.counters
        if self.observer is not None:
            self.observer.admitted(seq, first=seq.num_cached is None)
        if seq.num_cached is not None:
            counters.readmission_hit_tokens += seq.num_computed
        elif seq.index > 0:
            seq.num_cached = self.requests[seq.request.request_id][0].num_cached or 0
            seq.num_shared = seq.num_computed
            counters.sibling_hit_tokens += seq.num_computed
        else:
            seq.num_cached = seq.num_computed
            counters.hit_tokens += seq.num_computed
            if self.config.enable_prefix_caching and not seq.needs_every_token:
                counters.query_tokens += seq.num_prompt
            counters.queue_seconds += max(0.0, now - seq.request.arrival)

    def _preempt(self, seq: Sequence, draft: _Draft) -> None:
        """Take the blocks of `seq` away; it waits and later recomputes (or hits) what it had.

        The beams of a search go together, and the search starts again from the prompt.
        """
        search = self._searches.get(seq.request.request_id)
        if search is None:
            self._set_back(seq, draft)
            return
        for beam in search.sequences:
            if beam.status is _RUNNING:
                self._set_back(beam, draft)
        search.restart()

    def _set_back(self, seq: Sequence, draft: _Draft) -> None:
        draft.drop(seq)
        self.running.remove(seq)
        self.counters.lost_tokens += seq.num_computed
        if self.observer is not None:
            self.observer.preempted(seq, seq.num_computed)
        self.tables.free(seq)
        seq.pooled = b""
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        bisect.insort(self.waiting, seq, key=_ORDER)
        self.counters.preemptions += 1
        total = self.counters.preemptions
        if total & (total - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: the log stays short under lasting pressure
            logger.warning(
                "a sequence lost its KV blocks and will be recomputed: %d preemptions so far "
                "(%d blocks, %d running, %d waiting); more KV memory or a smaller max_num_seqs avoids it",
                total,
                self.config.num_blocks,
                len(self.running),
                len(self.waiting),
            )

    # ------------------------------------------------------------------ commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[OutputEvent]:
        """Enter the results of a step into the books; the events of the step and those pending."""
        events = []
        tops: dict[Sequence, tuple[tuple[int, float], ...]] = {}
        for seq, row, out in zip(self._in_flight, plan.rows, result.rows, strict=True):
            if seq.status is _RUNNING:  # else it was aborted while the step ran
                events += self._commit_row(seq, row, out)
                if self._searches and out.logprobs is not None:
                    tops[seq] = out.logprobs.top
        for search in tuple(self._searches.values()):
            if search.sequences[0] in tops:
                events += self._advance_search(search, tops)
        self._in_flight = ()
        self._forks = {}
        self.counters.steps += 1
        if self.observer is not None:
            self.observer.step_committed()
        if not self.running and not self.waiting:
            assert (
                self.tables.pool.num_used == self.tables.retention.num_pinned
                and not self.requests
                and self._num_live == 0
            )
        return self.take_pending() + events

    def take_pending(self) -> list[OutputEvent]:
        pending, self._pending = self._pending, []
        return pending

    def _commit_row(self, seq: Sequence, row: PlanRow, out: RowResult) -> list[OutputEvent]:
        """The events of a row's sequence and of its forks."""
        forks: list[tuple[Sequence, RowResult]] = []
        if planned := self._forks.get(seq):
            pairs = zip(planned, out.forks or (out,) * len(planned), strict=True)
            forks = [(fork, drawn) for fork, drawn in pairs if fork.status is _WAITING]
        search = self._searches.get(seq.request.request_id) if self._searches else None
        if out.error is not None:
            failed = search.sequences if search is not None else [seq, *(fork for fork, _ in forks)]
            return self._fail([one for one in failed if not one.finished], out.error)
        end = row.start + len(row.token_ids)
        if row.start < seq.num_prompt:
            self.counters.prompt_tokens_computed += min(end, seq.num_prompt) - row.start
        seq.num_computed = end
        self.tables.register(seq)
        if row.start < seq.num_prompt <= end:
            self.tables.register_tail(seq)
            self.tables.retention.pin(seq)
        scores = out.scores
        if row.score_ids:  # a recomputed row may score again what was already reported
            scores = scores[max(0, seq.prompt_logprobs_done - row.start) :]
            seq.prompt_logprobs_done += len(scores)
        for fork, _ in forks:
            self._start_fork(fork, seq)
        if search is not None and row.sample is not None:
            return [_news(seq, scores)] if scores else []
        events = [self._take(seq, out, scores), *(self._take(fork, drawn, ()) for fork, drawn in forks)]
        return [event for event in events if event is not None]

    def _start_fork(self, fork: Sequence, seq: Sequence) -> None:
        """`fork` runs from here on, on the blocks of its sibling `seq`, whose prompt has just been computed."""
        self.waiting.remove(fork)
        fork.status = _RUNNING
        bisect.insort(self.running, fork, key=_ORDER)
        self.tables.share(seq, fork)
        self._count_admission(fork, 0.0)  # its queue time is its request's

    def _take(self, seq: Sequence, out: RowResult, scores: tuple[TokenLogprobs, ...]) -> OutputEvent | None:
        """What a sequence drew, if anything, and whether that ends it."""
        if out.error is not None:
            return self._fail([seq], out.error)[0]
        token_ids: tuple[int, ...] = ()
        reason = None
        if out.pooled is not None:
            seq.pooled = out.pooled
        if out.token_id is not None:
            token_ids = (out.token_id,)
            seq.token_ids.append(out.token_id)
            self.counters.generated_tokens += 1
            if self.observer is not None and len(seq.token_ids) == seq.num_prompt + 1:
                self.observer.first_token(seq)
            reason = self._reason_to_stop(seq, out.token_id)
        elif seq.num_computed == seq.num_known:
            # max_tokens 0: only the prompt was wanted
            reason = FinishReason.LENGTH if out.pooled is None else FinishReason.STOP
        if reason is not None:
            self._finish(seq, reason)
        elif not token_ids and not scores:
            return None
        logprobs = (out.logprobs,) if out.logprobs is not None else None
        embedding = out.pooled if reason is not None else None
        return _news(seq, scores, token_ids, logprobs, embedding=embedding)

    def _advance_search(
        self, search: BeamSearch, tops: dict[Sequence, tuple[tuple[int, float], ...]]
    ) -> list[OutputEvent]:
        """Let the beams go on to their next tokens, or end the search; `tops` of those that have just been computed."""
        sequences = search.sequences
        assert not search.length or all(seq in tops for seq in sequences), "a beam was left behind"
        beams = search.advance([tops.get(seq, ()) for seq in sequences])
        self.counters.generated_tokens += len(beams)
        if self.observer is not None and search.length == 1:
            for seq in sequences:
                self.observer.first_token(seq)
        if search.settled:
            return self._end_search(search)
        search.sequences = move(self.tables, sequences, beams)[: len(beams)]
        for seq in sequences:
            if seq not in search.sequences:  # too few continuations for all
                self._finish(seq, FinishReason.LENGTH)
        return []

    def _end_search(self, search: BeamSearch) -> list[OutputEvent]:
        """The n best results, in the places of the first n sequences."""
        samples = self.requests[search.request.request_id]
        results: list[Hypothesis] = search.finished[: search.request.params.n]
        if not results:
            return self._fail([seq for seq in samples if not seq.finished], "the search found no continuation")
        events = []
        for seq in samples:
            found = results[min(seq.index, len(results) - 1)]
            entries = found.path.entries()
            if not seq.finished:
                self.tables.drop(seq)
                seq.token_ids[seq.num_prompt :] = [entry.token_id for entry in entries]
                seq.stop_reason = found.stop_reason
                self._finish(seq, found.reason)
            if seq.index < search.request.params.n:
                seq.finish_reason = found.reason
                events.append(_news(seq, (), tuple(seq.token_ids[seq.num_prompt :]), entries, found.score))
        return events

    def _fail(self, sequences: list[Sequence], error: str) -> list[OutputEvent]:
        for seq in sequences:
            self._finish(seq, FinishReason.ERROR)
        return _terminal_events(sequences, error)

    def _reason_to_stop(self, seq: Sequence, token_id: int) -> FinishReason | None:
        """Stop wins over length on the same token. Before `min_tokens` only a grammar can end the text."""
        request = seq.request
        num_generated = len(seq.token_ids) - seq.num_prompt
        if seq.constraint is not None and seq.constraint.accept(token_id):
            return FinishReason.STOP
        if token_id in request.eos_token_ids and not request.params.ignore_eos:
            return FinishReason.STOP
        if token_id in request.params.stop_token_ids and num_generated > request.params.min_tokens:
            seq.stop_reason = token_id
            return FinishReason.STOP
        if num_generated >= request.max_tokens or len(seq.token_ids) >= self._max_known:
            return FinishReason.LENGTH
        return None

    # ------------------------------------------------------------------ faults

    def fail_in_flight(self, message: str) -> list[OutputEvent]:
        """A step failed: end the requests in it (all, if none was planned) and start from clean KV books.

        What a failed step left in the KV blocks is unknown, so nothing cached survives. Those that wait
        go on, and those that run but had no token in the step start again.
        """
        live = {s.request.request_id: s for s in (self._in_flight or [*self.running, *self.waiting])}
        self._in_flight = ()
        self._forks = {}
        self.tables.reset(self.running)
        for request_id in live:
            for seq in self.requests.get(request_id, ()):
                if not seq.finished:
                    self._pending += self._fail([seq], message)
        return self.take_pending()


def _news(
    seq: Sequence,
    scores: tuple[TokenLogprobs, ...],
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] | None = None,
    score: float | None = None,
    embedding: bytes | None = None,
) -> OutputEvent:
    return OutputEvent(
        seq.request.request_id,
        seq.index,
        token_ids,
        logprobs,
        scores,
        seq.num_cached or 0,
        seq.finish_reason,
        seq.stop_reason,
        num_shared=seq.num_shared,
        score=score,
        embedding=embedding,
    )


def _terminal_events(sequences: Iterable[Sequence], error: str | None = None) -> list[OutputEvent]:
    """The last events of sequences that ended without a token; nobody knows of the further beams of a search."""
    return [
        OutputEvent(
            seq.request.request_id,
            seq.index,
            num_cached=seq.num_cached or 0,
            finish_reason=seq.finish_reason,
            error=error,
        )
        for seq in sequences
        if seq.index < seq.request.params.num_outputs
    ]


def _sample_spec(seq: Sequence) -> SampleSpec:
    """How to draw the token after all that `seq` knows."""
    request = seq.request
    banned = () if seq.num_generated >= request.params.min_tokens else _ids_to_ban(request)
    mask = None if seq.constraint is None else seq.constraint.mask()
    wanted = num_candidates(request) if request.params.use_beam_search else 0
    return SampleSpec(
        request.params, request.seed, seq.index, seq.num_known, seq.token_ids, seq.num_prompt, banned, mask, wanted
    )


def _ids_to_ban(request: Request) -> tuple[int, ...]:
    """What may not be drawn before `min_tokens`: everything that would end the sequence.

    Under a grammar a stop token may be the only way on; it is drawn then, and does not stop.
    """
    ids = set(request.params.stop_token_ids) if request.grammar is None else set()
    if not request.params.ignore_eos:
        ids |= request.eos_token_ids
    return tuple(sorted(ids))
