"""Any order of add, step, abort and finish over tiny pools: books balance, answers equal those of a solo run (C122)."""

import random
from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.run import Driver, check_books, check_idle, preempt_last
from support.script_backend import HashBackend

from octavo.errors import NeverFitsError, QueueFullError, RequestError
from octavo.kv.sizing import check_fits
from octavo.request import FinishReason, SamplingParams

VOCAB = 32
EOS = frozenset({0, 1})

PARAMS = (
    SamplingParams(temperature=0, max_tokens=12, logprobs=1),
    SamplingParams(n=3, max_tokens=9, seed=1),
    SamplingParams(max_tokens=30, seed=2, min_tokens=3, stop_token_ids=(5,), repetition_penalty=1.5),
    SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=0),
    SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0, max_tokens=10, length_penalty=0.5),
    SamplingParams(n=6, max_tokens=5, seed=3),
)


def make_prompt(num_tokens, family):
    """Prompts of one family are prefixes of each other."""
    return [(family * 5 + i * i + 3 * i) % VOCAB for i in range(num_tokens)]


def backend(block_size=4, **options):
    return HashBackend(vocab_size=VOCAB, block_size=block_size, keep_trace=False, **options)


@cache
def solo(num_tokens, family, kind, salt, num_blocks):
    """Answers of all samples of a request that has an engine for itself and no prefix cache."""
    driver = Driver(backend(), num_blocks=num_blocks, enable_prefix_caching=False, max_num_seqs=3)
    driver.add(make_prompt(num_tokens, family), PARAMS[kind], "r", eos_token_ids=EOS, cache_salt=salt)
    driver.run()
    return [driver.outcomes["r", i].answer for i in range(PARAMS[kind].num_outputs)]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 14),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 3, 8, 64]),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        admission=st.sampled_from(["greedy", "foresight"]),
        max_preemptions=st.sampled_from([1, 2, 100]),
        mode=st.sampled_from(["full", "tail"]),
        cap=st.sampled_from([0, 0, 2, 7]),
        retention=st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.3, 1.0, 1.0])),
    )
    def start(
        self, num_blocks, max_num_seqs, budget, caching, policy, admission, max_preemptions, mode, cap, retention
    ):
        self.driver = Driver(
            backend(),
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            admission=admission,
            max_preemptions=max_preemptions,
            preemption_mode=mode,
            long_prefill_token_threshold=cap,
            cache_pin_limit=retention[0],
            tenant_cache_quota=retention[1],
            max_num_waiting=6,
        )
        self.asked = {}  # request id -> arguments of solo()
        self.cut = set()  # (request id, sample) that was aborted or finished from outside

    @rule(
        num_tokens=st.integers(1, 30),
        family=st.integers(0, 2),
        kind=st.integers(0, len(PARAMS) - 1),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(-1, 1),
        pin=st.sampled_from([None, None, 3.0, 9.0]),
    )
    def add(self, num_tokens, family, kind, salt, priority, pin):
        num_blocks = self.driver.engine.config.num_blocks
        retention = self.driver.engine.scheduler.tables.retention
        most = retention.max_pinned if retention.quota is None else min(retention.max_pinned, retention.quota)
        if not (1 <= num_tokens // 4 <= most and self.driver.engine.config.enable_prefix_caching):
            pin = None
        options = {"cache_salt": salt, "tenant": salt, "priority": priority, "pin_seconds": pin}
        try:
            request_id = self.driver.add(make_prompt(num_tokens, family), PARAMS[kind], eos_token_ids=EOS, **options)
        except NeverFitsError:
            params = PARAMS[kind]
            with pytest.raises(NeverFitsError):
                check_fits(num_tokens, params.max_tokens, num_blocks, 4, params.num_sequences)
        except QueueFullError:
            assert len(self.driver.engine.scheduler.requests) > 0
        except RequestError:
            config = self.driver.engine.config
            assert PARAMS[kind].use_beam_search and min(config.max_num_seqs, config.max_num_batched_tokens) < 3
        else:
            self.asked[request_id] = (num_tokens, family, kind, salt, num_blocks)

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.driver.step()

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick):
        request_id = list(self.asked)[pick % len(self.asked)]
        self.cut |= {(request_id, s.index) for s in self.live(request_id)}
        self.driver.engine.abort(request_id)

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 1000), index=st.integers(0, 2))
    def finish_sequence(self, pick, index):
        request_id = list(self.asked)[pick % len(self.asked)]
        if not PARAMS[self.asked[request_id][2]].use_beam_search:
            self.cut |= {(request_id, s.index) for s in self.live(request_id) if s.index == index}
        self.driver.engine.finish_sequence(request_id, index)

    @precondition(lambda self: len(self.driver.engine.scheduler.running) > 1)
    @rule(keep=st.booleans())
    def preempt(self, keep):
        preempt_last(self.driver.engine, keep=keep)

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def time_goes_on(self, seconds):
        self.driver.engine._clock.advance(seconds)

    @rule()
    def evict(self):
        """Everything that is free loses its cached content."""
        pool = self.driver.engine.scheduler.tables.pool
        pool.release([pool.allocate() for _ in range(pool.num_free)])

    @rule()
    def run_to_the_end(self):
        self.driver.run(max_steps=5000)
        for request_id, arguments in self.asked.items():
            for index, answer in enumerate(solo(*arguments)):
                outcome = self.driver.outcomes[request_id, index]
                if (request_id, index) in self.cut:
                    assert outcome.token_ids == answer[0][: len(outcome.token_ids)]
                    assert outcome.finish_reason in (None, FinishReason.ABORT)
                else:
                    assert outcome.answer == answer
        self.asked.clear()
        self.cut.clear()
        self.driver.outcomes.clear()

    @invariant()
    def books_balance(self):
        if hasattr(self, "driver"):
            check_books(self.driver.engine)

    def live(self, request_id):
        return [s for s in self.driver.engine.scheduler.requests.get(request_id, ()) if not s.finished]

    def teardown(self):
        if hasattr(self, "driver"):
            self.run_to_the_end()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("mode", ["full", "tail"])
def test_mixed_load(mode):
    """C122: 2,000 requests with samples and beams, aborts and stops, failing rows and failing steps: nothing is left.

    Every step checks that free and used blocks add up, and that references are what tables hold, none below 0.
    """
    rng = random.Random(122)

    def row_error(row):
        return "bad row" if row.token_ids[0] % 29 == 3 and rng.random() < 0.02 else None

    fail_steps = set(rng.sample(range(6000), 60))
    driver = Driver(
        backend(fail_steps=fail_steps, row_error=row_error),
        num_blocks=24,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        admission="greedy",
        preemption_mode=mode,
    )
    engine = driver.engine
    remaining = 2000
    while remaining or engine.has_unfinished:
        while remaining and len(engine.scheduler.requests) < 12:
            driver.add(make_prompt(rng.randint(1, 40), rng.randint(0, 3)), rng.choice(PARAMS), eos_token_ids=EOS)
            remaining -= 1
        if rng.random() < 0.1 and engine.scheduler.requests:
            request_id = rng.choice(list(engine.scheduler.requests))
            if rng.random() < 0.5:
                engine.abort(request_id)
            else:
                engine.finish_sequence(request_id, 0)
                driver.outcomes.pop((request_id, 0), None)
        driver.step()
    check_idle(engine)
    pool = engine.scheduler.tables.pool
    assert sorted(pool._free_ids()) == list(range(24))
    stats = engine.stats()
    assert sum(stats.num_finished.values()) == 2000
    assert min(stats.num_finished.values()) > 50
    assert stats.num_preemptions > 50
