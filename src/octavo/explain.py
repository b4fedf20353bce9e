"""Why a request took as long as it did: what it waited for, what the cache gave, chunks, preemptions.

A `Recorder` listens to the scheduler and keeps one `Story` per live request and those of a bounded
number of recent ones. The same events are added up in its totals, which feed the metrics.
All times are seconds of the engine's clock, in explanations relative to the arrival of the request.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any

from octavo.clock import Clock
from octavo.events import Observer, WaitReason
from octavo.kv.prefix import block_hash, root_hash
from octavo.kv.tables import BlockTables
from octavo.request import FinishReason, Sequence

MAX_CHUNKS = 64  # of a sample; later ones are only added up
MAX_PREEMPTIONS = 16
MAX_FORGOTTEN = 65_536  # block hashes remembered after eviction, 32 bytes each
MAX_FIRST_BLOCKS = 4_096
HISTOGRAM_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Miss(enum.StrEnum):
    """Why the hit of a prompt ends where it ends."""

    OFF = "caching_off"
    PROMPT_LOGPROBS = "prompt_logprobs"  # they need the logits of every prompt token, so nothing is looked up
    POOLING = "pooling"  # the mean needs the hidden state of every prompt token
    TOO_SHORT = "too_short"  # no full block before the last prompt token
    EVICTED = "evicted"  # the next block was cached once
    OTHER_SALT = "other_salt"  # the prompt's first block was seen, but only with another cache_salt
    NEVER_SEEN = "never_seen"


class Histogram:
    """Counts by upper bound, in the manner of Prometheus; bounds in seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(HISTOGRAM_BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        i = next((i for i, bound in enumerate(HISTOGRAM_BOUNDS) if seconds <= bound), len(HISTOGRAM_BOUNDS))
        self.counts[i] += 1
        self.total += seconds


@dataclass(slots=True)
class _Sample:
    """What happened to one sequence. `since`: when it began to wait for `waiting_for`."""

    since: float
    waiting_for: WaitReason | None = WaitReason.LINE
    waits: dict[WaitReason, float] = field(default_factory=dict)
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: FinishReason | None = None
    hit_tokens: int = 0
    miss: Miss | None = None
    chunks: list[int] = field(default_factory=list)
    num_computed: int = 0  # in all chunks, also those that are not listed
    num_generated: int = 0
    prefill_seconds: float = 0.0  # steps with a chunk of it, until its first token
    preemptions: list[dict[str, Any]] = field(default_factory=list)  # at most MAX_PREEMPTIONS, the last ones
    num_preempted: int = 0

    def wait_for(self, reason: WaitReason | None, now: float) -> None:
        self.waits = self.waits_until(now)
        self.waiting_for, self.since = reason, now

    def waits_until(self, now: float) -> dict[WaitReason, float]:
        """Those that are over, and the one that is not."""
        if self.waiting_for is None:
            return self.waits
        return {**self.waits, self.waiting_for: self.waits.get(self.waiting_for, 0.0) + now - self.since}

    def as_dict(self, index: int, arrival: float, now: float) -> dict[str, Any]:
        return {
            "index": index,
            "waits": [{"for": r.value, "seconds": round(s, 6)} for r, s in self.waits_until(now).items()],
            "waiting_for": self.waiting_for and self.waiting_for.value,
            "hit_tokens": self.hit_tokens,
            "miss_reason": self.miss and self.miss.value,
            "chunks": list(self.chunks),
            "computed_tokens": self.num_computed,
            "num_preemptions": self.num_preempted,
            "preemptions": [{**p, "at_seconds": _after(arrival, p["at_seconds"])} for p in self.preemptions],
            "generated_tokens": self.num_generated,
            "first_token_seconds": _after(arrival, self.first_token_at),
            "finished_seconds": _after(arrival, self.finished_at),
            "finish_reason": self.finish_reason and self.finish_reason.value,
        }


def _after(arrival: float, time: float | None) -> float | None:
    return None if time is None else round(max(0.0, time - arrival), 6)


class Story:
    """One request: its samples, and when it came."""

    __slots__ = ("arrival", "num_prompt", "num_unfinished", "priority", "request_id", "samples", "tenant")

    def __init__(self, sequences: ListLike[Sequence], now: float) -> None:
        request = sequences[0].request
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.priority = request.priority
        self.arrival = request.arrival
        self.num_prompt = sequences[0].num_prompt
        self.samples = [_Sample(now) for _ in sequences]
        self.num_unfinished = len(sequences)

    def as_dict(self, now: float) -> dict[str, Any]:
        """Plain values. Queue and prefill are those of the sample that was first to have a token."""
        first = min(
            self.samples, key=lambda s: (s.first_token_at is None, s.first_token_at or 0.0, s.admitted_at is None)
        )
        running = any(s.waiting_for is None and s.finished_at is None for s in self.samples)
        return {
            "status": "finished" if not self.num_unfinished else "running" if running else "waiting",
            "num_prompt_tokens": self.num_prompt,
            "priority": self.priority,
            "age_seconds": _after(self.arrival, now),
            "queue_seconds": _after(self.arrival, first.admitted_at),
            "prefill_seconds": round(first.prefill_seconds, 6),
            "first_token_seconds": _after(self.arrival, first.first_token_at),
            "samples": [sample.as_dict(i, self.arrival, now) for i, sample in enumerate(self.samples)],
        }


class Recorder(Observer):
    """Keeps the stories of live requests and of the `capacity` last ones, and totals over all.

    `wait_seconds` by reason, `misses` counts first admissions by reason (None: all that can be hit was),
    `queue` from arrival to first admission, `prefill` the steps that computed the prompt; per sequence.
    """

    def __init__(self, clock: Clock, tables: BlockTables, capacity: int = 512) -> None:
        self._clock = clock
        self._tables = tables
        self._capacity = capacity
        self._stories: OrderedDict[str, Story] = OrderedDict()  # live ones
        self._recent: OrderedDict[str, Story] = OrderedDict()
        self._in_step: dict[Sequence, int] = {}  # chunk of each sequence in the step being computed
        self._step_began = 0.0
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()
        self._max_forgotten = min(MAX_FORGOTTEN, max(1024, 4 * tables.pool.num_blocks))
        self._first_blocks: OrderedDict[bytes, tuple[str, str]] = OrderedDict()  # plain hash -> salt, tenant
        tables.pool.cache.on_forget = self._remember_forgotten
        self.wait_seconds = dict.fromkeys(WaitReason, 0.0)
        self.misses: dict[Miss | None, int] = dict.fromkeys([*Miss, None], 0)
        self.queue = Histogram()
        self.prefill = Histogram()

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """The story of a live or recent request, as plain values; None if there is none."""
        story = self._stories.get(request_id) or self._recent.get(request_id)
        return None if story is None else story.as_dict(self._clock.now())

    def totals(self) -> dict[str, Any]:
        """Sums over all requests since the start, as plain values."""
        return {
            "wait_seconds": {reason.value: seconds for reason, seconds in self.wait_seconds.items()},
            "misses": {reason.value if reason else "none": count for reason, count in self.misses.items()},
            "bounds": list(HISTOGRAM_BOUNDS),
            "queue": {"counts": list(self.queue.counts), "total": self.queue.total},
            "prefill": {"counts": list(self.prefill.counts), "total": self.prefill.total},
        }

    def __len__(self) -> int:
        return len(self._stories) + len(self._recent)

    # ------------------------------------------------------------------ hooks

    def queued(self, samples: ListLike[Sequence]) -> None:
        story = Story(samples, self._clock.now())
        self._stories[story.request_id] = story

    def held(self, seq: Sequence, reason: WaitReason) -> None:
        sample = self._sample(seq)
        if sample.waiting_for is not reason:
            self._wait(sample, reason, self._clock.now())

    def admitted(self, seq: Sequence, num_hits: int, *, first: bool) -> None:
        sample, now = self._sample(seq), self._clock.now()
        self._wait(sample, None, now)
        if first:
            sample.admitted_at = now
            sample.hit_tokens = num_hits
            sample.miss = self._miss(seq)
            self.misses[sample.miss] += 1
            self.queue.observe(max(0.0, now - seq.request.arrival))
        elif sample.preemptions:
            sample.preemptions[-1]["restored_tokens"] = num_hits

    def computing(self, seq: Sequence, num_tokens: int) -> None:
        if not self._in_step:
            self._step_began = self._clock.now()
        self._in_step[seq] = num_tokens

    def preempted(self, seq: Sequence, num_lost: int) -> None:
        self._in_step.pop(seq, None)  # what this step had planned for it
        sample, now = self._sample(seq), self._clock.now()
        sample.num_preempted += 1
        if len(sample.preemptions) >= MAX_PREEMPTIONS:
            del sample.preemptions[0]
        sample.preemptions.append({"at_seconds": now, "lost_tokens": num_lost, "restored_tokens": 0})
        self._wait(sample, WaitReason.LINE, now)

    def reclaimed(self, seq: Sequence, num_lost: int) -> None:
        self._sample(seq).preemptions[-1]["lost_tokens"] += num_lost

    def first_token(self, seq: Sequence) -> None:
        sample, now = self._sample(seq), self._clock.now()
        self._enter_chunk(seq, now)
        sample.first_token_at = now
        self.prefill.observe(sample.prefill_seconds)

    def finished(self, seq: Sequence) -> None:
        story = self._stories[seq.request.request_id]
        sample, now = story.samples[seq.index], self._clock.now()
        self._enter_chunk(seq, now)
        self._wait(sample, None, now)
        sample.finished_at = now
        sample.finish_reason = seq.finish_reason
        sample.num_generated = seq.num_generated
        story.num_unfinished -= 1
        if not story.num_unfinished:
            del self._stories[story.request_id]
            self._recent[story.request_id] = story
            self._recent.move_to_end(story.request_id)
            while len(self._recent) > self._capacity:
                self._recent.popitem(last=False)

    def step_committed(self) -> None:
        if self._in_step:
            now = self._clock.now()
            for seq in list(self._in_step):
                self._enter_chunk(seq, now)

    # ------------------------------------------------------------------ inside

    def _sample(self, seq: Sequence) -> _Sample:
        return self._stories[seq.request.request_id].samples[seq.index]

    def _wait(self, sample: _Sample, reason: WaitReason | None, now: float) -> None:
        if sample.waiting_for is not None:
            self.wait_seconds[sample.waiting_for] += now - sample.since
        sample.wait_for(reason, now)

    def _enter_chunk(self, seq: Sequence, now: float) -> None:
        num_tokens = self._in_step.pop(seq, None)
        if num_tokens is None:
            return
        sample = self._sample(seq)
        sample.num_computed += num_tokens
        if len(sample.chunks) < MAX_CHUNKS:
            sample.chunks.append(num_tokens)
        if sample.first_token_at is None:
            sample.prefill_seconds += now - self._step_began

    def _remember_forgotten(self, digest: bytes) -> None:
        self._forgotten[digest] = None
        if len(self._forgotten) > self._max_forgotten:
            self._forgotten.popitem(last=False)

    def _miss(self, seq: Sequence) -> Miss | None:
        """Why the first block that was not hit was not; asked just after the hits were taken."""
        block_size = self._tables.block_size
        if not self._tables.enable_prefix_caching:
            return Miss.OFF
        if seq.owes_prompt_logprobs:
            return Miss.PROMPT_LOGPROBS
        if seq.needs_every_token:
            return Miss.POOLING
        missed = seq.num_computed // block_size
        if (missed + 1) * block_size > seq.num_known - 1:
            return None if seq.num_computed else Miss.TOO_SHORT
        other_salt = self._other_salt(seq)
        if seq.block_hashes[missed] in self._forgotten:
            return Miss.EVICTED
        return Miss.OTHER_SALT if other_salt and missed == 0 else Miss.NEVER_SEEN

    def _other_salt(self, seq: Sequence) -> bool:
        """Did the same tenant send this first block with another salt? Notes that it was sent with this one.

        Of other tenants nothing is told, not even this: what they asked is theirs.
        """
        plain = block_hash(root_hash(""), seq.token_ids[: self._tables.block_size])
        salt, tenant = seq.request.cache_salt, seq.request.tenant
        before = self._first_blocks.get(plain)
        self._first_blocks[plain] = (salt, tenant)
        self._first_blocks.move_to_end(plain)
        if len(self._first_blocks) > MAX_FIRST_BLOCKS:
            self._first_blocks.popitem(last=False)
        return before is not None and before[0] != salt and before[1] == tenant
