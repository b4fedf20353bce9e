"""Backends in pure Python on the Backend seam: a scripted model, and one whose tokens prove the KV right.

Both really store something in KV slots by block table and read the whole context back from the slots,
so a wrong block table, a block freed too early or a stale prefix hit changes the answer or raises.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.backends.base import Capabilities
from octavo.plan import PlanRow, PoolSpec, RowResult, SampleSpec, StepPlan, StepResult, TokenLogprobs
from octavo.request import Pooling

FORCED_LOGIT = 30.0

Logits = dict[int, float]
"""Sparse logits: ids that are absent have 0."""

Script = Sequence[int] | Mapping[tuple[int, ...], Sequence[int]] | Callable[[SampleSpec], int]
"""The generated tokens: for all prompts, per prompt, or as a function of the SampleSpec."""


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class RowTrace:
    """What one row of a step looked like."""

    start: int
    num_tokens: int
    sampled: bool
    block_ids: tuple[int, ...]


@dataclass
class SlotBackend:
    """Keeps KV slots; subclasses say what the logits of a context are.

    A slot holds the digest of all tokens up to its position, made from the slot before it *as read
    through the block table*: like real KV, it depends on the whole prefix and not only on its own token.
    `fail_steps` are numbers of steps (from 0) whose execution raises; `row_error` may turn a row into
    an error; `trace` has one list of RowTrace per step.
    """

    vocab_size: int = 128
    block_size: int = 16
    fail_steps: set[int] = field(default_factory=set)
    row_error: Callable[[PlanRow], str | None] | None = None
    keep_trace: bool = True
    trace: list[list[RowTrace]] = field(default_factory=list)
    num_steps: int = 0
    slots: list[bytes | None] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="script", vocab_size=self.vocab_size, weight_bytes=0, kv_bytes_per_block=64 * self.block_size
        )

    def allocate_kv(self, num_blocks: int) -> None:
        assert not self.slots, "allocate_kv called twice"
        self.slots = [None] * (num_blocks * self.block_size)

    def close(self) -> None:
        self.slots = []

    def execute(self, plan: StepPlan) -> StepResult:
        step, self.num_steps = self.num_steps, self.num_steps + 1
        if self.keep_trace:
            self.trace.append(
                [RowTrace(r.start, len(r.token_ids), r.sample is not None, tuple(r.block_ids)) for r in plan.rows]
            )
        for source, target in plan.copies:
            assert source != target, "a block is copied onto itself"
            size = self.block_size
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        self._check_writes(plan)
        # All rows write before any reads, as in a real step: a row must not depend on its place in the plan.
        contexts = [self._write(row) for row in plan.rows]
        if step in self.fail_steps:
            raise RuntimeError(f"scripted failure of step {step}")
        return StepResult(tuple(self._result(row, ctx) for row, ctx in zip(plan.rows, contexts, strict=True)))

    def _slot(self, row: PlanRow, position: int) -> int:
        return row.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _check_writes(self, plan: StepPlan) -> None:
        """No block is written by two rows, or written by one and read by another in the same step."""
        written: dict[int, int] = {}
        for i, row in enumerate(plan.rows):
            end = row.start + len(row.token_ids)
            assert len(row.block_ids) * self.block_size >= end, "the block table is too short"
            for b in range(row.start // self.block_size, -(-end // self.block_size)):
                assert row.block_ids[b] not in written, "a block is written twice in a step"
                written[row.block_ids[b]] = i
        for i, row in enumerate(plan.rows):
            for block_id in row.block_ids:
                assert written.get(block_id, i) == i, "a block is read by one row and written by another"

    def _read(self, row: PlanRow, position: int) -> bytes:
        value = self.slots[self._slot(row, position)]
        assert value is not None, f"slot of position {position} was never written"
        return value

    def _write(self, row: PlanRow) -> list[bytes]:
        """Write the row's KV; for each of its positions the digest of the context up to there."""
        chain = hashlib.blake2b(digest_size=16)
        for position in range(row.start):
            chain.update(self._read(row, position))
        contexts = []
        for i, token_id in enumerate(row.token_ids):
            position = row.start + i
            previous = self._read(row, position - 1) if position else b""
            value = digest(previous, token_id)
            self.slots[self._slot(row, position)] = value
            chain.update(value)
            contexts.append(chain.digest())
        return contexts

    def _result(self, row: PlanRow, contexts: list[bytes]) -> RowResult:
        error = self.row_error(row) if self.row_error is not None else None
        if error is not None:
            return RowResult(error=error)
        scores = tuple(
            self._logprobs(self.score_logits(contexts[i]), token_id, row.num_scores)
            for i, token_id in enumerate(row.score_ids)
        )
        spec = row.sample
        if spec is None:
            return RowResult(scores=scores, pooled=None if row.pool is None else self._pool(row.pool, contexts))
        first, *forks = (self._drawn(contexts[-1], one) for one in (spec, *row.forks))
        return RowResult(first.token_id, first.logprobs, () if first.error else scores, first.error, forks=tuple(forks))

    def _drawn(self, context: bytes, spec: SampleSpec) -> RowResult:
        raw = self.logits(context, spec)
        token_id = self._draw(raw, spec)
        if token_id is None:
            return RowResult(error="no token may be drawn: all are excluded")
        num_top = spec.num_logprobs
        return RowResult(token_id, None if num_top is None else self._logprobs(raw, token_id, num_top))

    def _pool(self, pool: PoolSpec, contexts: list[bytes]) -> bytes:
        """Hidden states of four bytes per context: the last one, or the float64 sum over tokens, then the mean."""
        if pool.pooling is Pooling.LAST:
            return struct.pack("<4f", *contexts[-1][:4])
        *sums, num = struct.unpack("<5d", pool.state) if pool.state else [0.0] * 5
        for context in contexts:
            sums = [s + c for s, c in zip(sums, context, strict=False)]
            num += 1
        return struct.pack("<4f", *(s / num for s in sums)) if pool.last else struct.pack("<5d", *sums, num)

    def _draw(self, raw: Logits, spec: SampleSpec) -> int | None:
        """Argmax of the biased logits without the banned and masked ids; ties: lowest id. None: nothing is left."""
        biased = dict(raw)
        for token_id, bias in spec.params.logit_bias.items():
            biased[token_id] = biased.get(token_id, 0.0) + bias
        banned = set(spec.banned_ids)
        if spec.mask is not None:
            banned |= {i for i in range(self.vocab_size) if not spec.mask[i // 8] >> i % 8 & 1}
        rest = next((i for i in range(self.vocab_size) if i not in biased and i not in banned), None)
        candidates = [(-logit, i) for i, logit in biased.items() if i not in banned]
        if rest is not None:
            candidates.append((-0.0, rest))
        return min(candidates)[1] if candidates else None

    def _logprobs(self, logits: Logits, token_id: int, num_top: int) -> TokenLogprobs:
        """Exact log-softmax over the whole vocabulary."""
        total = sum(math.exp(x) for x in logits.values()) + (self.vocab_size - len(logits))
        ranked = sorted(range(min(self.vocab_size, num_top + len(logits) + 1)), key=lambda i: (-logits.get(i, 0.0), i))
        ranked = sorted({*ranked, *logits}, key=lambda i: (-logits.get(i, 0.0), i))
        top = tuple((i, logits.get(i, 0.0) - math.log(total)) for i in ranked[:num_top])
        mine = (-logits.get(token_id, 0.0), token_id)
        above = sum((-x, i) < mine for i, x in logits.items())
        if token_id not in logits:
            above += token_id - sum(i < token_id for i in logits)
        return TokenLogprobs(token_id, logits.get(token_id, 0.0) - math.log(total), above + 1, top)

    def score_logits(self, context: bytes) -> Logits:
        """Logits after a context, without regard to a request."""
        draws = hashlib.blake2b(context, digest_size=24).digest()
        return {int.from_bytes(draws[i : i + 6], "big") % self.vocab_size: float(draws[i]) / 32 for i in (0, 6, 12, 18)}

    def logits(self, context: bytes, spec: SampleSpec) -> Logits:
        raise AssertionError("a subclass says what the logits are")


@dataclass
class HashBackend(SlotBackend):
    """The next token is a pure function of (context as read from the KV slots, seed, sample, position).

    With penalties it also depends on which tokens count as generated. So equal tokens over two
    schedules mean that both read the same KV and drew with the same counters.
    """

    def logits(self, context: bytes, spec: SampleSpec) -> Logits:
        generated = sorted(spec.token_ids[spec.num_prompt :]) if spec.params.has_penalties else ()
        draw = () if spec.params.greedy else (spec.seed, spec.sample_index, spec.position)
        return self.score_logits(digest(context, draw, generated))


@dataclass
class ScriptBackend(SlotBackend):
    """Forces the tokens of `script`; where it has run out (or its token is banned) come the lowest ids.

    A forced token has logit 30 and everything else 0, so `logit_bias` 100 beats the script.
    """

    script: Script = ()
    end_id: int | None = None  # forced once the script has run out, for example EOS

    def logits(self, context: bytes, spec: SampleSpec) -> Logits:
        token_id = self._forced(spec)
        return {} if token_id is None else {token_id: FORCED_LOGIT}

    def _forced(self, spec: SampleSpec) -> int | None:
        if callable(self.script):
            return self.script(spec)
        done = len(spec.token_ids) - spec.num_prompt
        tokens = self.script
        if isinstance(tokens, Mapping):
            tokens = tokens[tuple(spec.token_ids[: spec.num_prompt])]
        return tokens[done] if done < len(tokens) else self.end_id
