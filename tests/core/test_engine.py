"""The engine's edges: validation, queue limits, aborts, faults, statistics.

Cases C043 C047 C058 C059 C062 C065 C091 C172 C175.
"""

import pytest
from support.run import Driver, check_books, check_idle, make_engine
from support.script_backend import HashBackend, ScriptBackend

from octavo.clock import VirtualClock
from octavo.errors import ContextLengthError, NeverFitsError, QueueFullError, RequestError
from octavo.plan import RowResult, StepResult
from octavo.request import FinishReason, Request, SamplingParams

ERROR, ABORT = FinishReason.ERROR, FinishReason.ABORT


def greedy(max_tokens=4, **kwargs):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kwargs)


def prompt(num_tokens, start=0):
    return [(start + 7 * i + i * i) % 128 for i in range(num_tokens)]


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize("bad", [128, 2**31, 10**20, -1, 1.0, True, None, "1"], ids=repr)
def test_token_ids_outside_the_vocabulary_are_refused(bad):
    """C062: at the door, with the place but not the value; whoever runs is not disturbed."""
    driver = Driver()
    running = driver.add(prompt(5), greedy(8))
    driver.step()
    with pytest.raises(RequestError, match="prompt: entry 2 is not a token id from 0 to 127") as caught:
        driver.add([1, 2, bad, 3])
    assert caught.value.param == "prompt"
    assert len(str(caught.value)) < 80
    driver.run()
    assert driver.outcomes[running, 0].token_ids == Driver().ask(prompt(5), greedy(8)).token_ids


def test_ids_in_bias_and_stop_are_checked():
    """C065."""
    engine = make_engine()
    for params, param in (
        (greedy(logit_bias={128: 5.0}), "logit_bias"),
        (greedy(logit_bias={99999999: -100.0}), "logit_bias"),
        (greedy(stop_token_ids=(5, 128)), "stop_token_ids"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.make_request("r", [1], params)
        assert caught.value.param == param
    engine.make_request("r", [0, 127], greedy(logit_bias={127: 5.0}, stop_token_ids=(127,)))


def test_empty_prompt():
    with pytest.raises(RequestError) as caught:
        make_engine().make_request("r", [], greedy())
    assert caught.value.code == "empty_prompt"


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(65, 4), (640, 4), (64, 1), (64, None), (65, 0)])
def test_prompts_that_leave_no_room(num_prompt, max_tokens):
    """C058, C059: both numbers are in the message."""
    engine = make_engine(max_model_len=64)
    with pytest.raises(ContextLengthError, match=rf"\b{num_prompt} tokens.*\b64 tokens") as caught:
        engine.make_request("r", prompt(num_prompt), greedy(max_tokens))
    assert (caught.value.param, caught.value.code, caught.value.status) == ("prompt", "context_length_exceeded", 400)


def test_requests_built_by_hand_meet_the_same_limits():
    engine = make_engine(max_model_len=64, num_blocks=2)

    def request(num_prompt):
        return Request(request_id="r", prompt_token_ids=prompt(num_prompt), params=greedy(), max_tokens=4, seed=0)

    with pytest.raises(ContextLengthError):
        engine.add_request(request(64))
    with pytest.raises(NeverFitsError):
        engine.add_request(request(40))


def test_salt_and_priority_are_bounded():
    engine = make_engine()
    for options, param in (({"cache_salt": "x" * 10_000}, "cache_salt"), ({"priority": 10**400}, "priority")):
        with pytest.raises(RequestError) as caught:
            engine.make_request("r", [1], greedy(), **options)
        assert caught.value.param == param


def test_request_owns_its_prompt_and_gets_a_seed():
    engine = make_engine()
    ids = [1, 2, 3]
    first, second = (engine.make_request("r", ids, SamplingParams()) for _ in range(2))
    ids.append(4)
    assert first.prompt_token_ids == [1, 2, 3]
    assert first.seed != second.seed
    assert make_engine().make_request("r", ids, SamplingParams()).seed == first.seed  # the engine's seed decides
    assert engine.make_request("r", ids, SamplingParams(seed=-1)).seed == 2**64 - 1
    assert engine.make_request("r", ids, SamplingParams(seed=0)).seed == 0


def test_duplicate_live_id():
    driver = Driver()
    driver.add([1, 2], request_id="x")
    with pytest.raises(RequestError) as caught:
        driver.add([1, 2], request_id="x")
    assert caught.value.param == "request_id"
    driver.run()
    driver.outcomes.clear()
    driver.add([1, 2], request_id="x")  # free again once the first has ended
    driver.run()


# ---------------------------------------------------------------- queue


def test_queue_is_bounded_and_n_counts_as_n():
    """C047: 2 run, 4 wait, the rest is told to come back."""
    driver = Driver(max_num_seqs=2, max_num_waiting=4)
    for i in range(6):
        driver.add(prompt(5, i), greedy(30))
    for i in range(6, 20):
        with pytest.raises(QueueFullError) as caught:
            driver.add(prompt(5, i), greedy(30))
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
    driver.engine.abort("r0")
    driver.engine.abort("r1")
    with pytest.raises(QueueFullError):
        driver.add([1], SamplingParams(n=3))
    driver.add([1], SamplingParams(n=2), request_id="two")
    driver.run()
    driver.add([1], SamplingParams(n=6), request_id="six")
    driver.run()
    with pytest.raises(RequestError) as caught:
        driver.add([1], SamplingParams(n=7))
    assert (caught.value.param, caught.value.status) == ("n", 400)


def test_a_preempted_sequence_never_finds_the_queue_full():
    driver = Driver(max_num_seqs=4, max_num_waiting=0, num_blocks=5, admission="greedy")
    for i in range(4):
        driver.add(prompt(14, i), greedy(30))
    driver.run()
    assert driver.engine.stats().num_preemptions > 0


# ---------------------------------------------------------------- abort, finish


def test_abort_frees_at_once_and_tells_with_the_next_step():
    driver = Driver()
    request_id = driver.add(prompt(40), greedy(50))
    driver.step()
    driver.engine.abort(request_id)
    assert driver.engine.stats().num_free_blocks == 256
    assert driver.engine.has_unfinished  # its last event is still to come
    (event,) = driver.step()
    assert (event.finish_reason, event.token_ids) == (ABORT, ())
    check_idle(driver.engine)
    assert driver.engine.stats().num_steps == 1  # nothing was computed for it


def test_abort_of_many_samples_of_which_some_wait():
    """C091."""
    driver = Driver(max_num_seqs=4)
    driver.add(prompt(40), SamplingParams(n=8, max_tokens=50, seed=0), request_id="r")
    driver.step()
    driver.step()
    driver.engine.abort("r")
    driver.engine.abort("r")
    driver.engine.abort("unknown")
    driver.run()
    assert all(driver.outcomes["r", i].finish_reason is ABORT for i in range(8))
    assert driver.engine.stats().num_finished[ABORT] == 1


def test_abort_while_the_step_runs():
    """The results of the step are dropped, and so is nothing else."""
    driver = Driver()
    driver.add(prompt(20), greedy(9), request_id="gone")
    driver.add(prompt(20, 1), greedy(9), request_id="stays")
    scheduler = driver.engine.scheduler
    plan = scheduler.plan(0.0)
    result = driver.engine.backend.execute(plan)
    driver.engine.abort("gone")
    events = scheduler.commit(plan, result)
    assert [(e.request_id, e.finish_reason) for e in events] == [("gone", ABORT), ("stays", None)]
    check_books(driver.engine)


def test_finish_sequence_ends_one_sample_silently():
    driver = Driver()
    driver.add(prompt(20), SamplingParams(n=2, max_tokens=9, seed=0), request_id="r")
    driver.step()
    driver.step()
    driver.engine.finish_sequence("r", 0)
    driver.engine.finish_sequence("r", 0)
    driver.engine.finish_sequence("r", 7)
    driver.engine.finish_sequence("unknown", 0)
    driver.run()
    assert driver.outcomes["r", 0].finish_reason is None
    assert len(driver.outcomes["r", 1].token_ids) == 9


def test_finish_sequence_before_its_siblings_started():
    driver = Driver(max_num_seqs=1)
    driver.add(prompt(20), SamplingParams(n=2, max_tokens=3, seed=0), request_id="r")
    driver.step()
    driver.engine.finish_sequence("r", 0)
    driver.run()
    assert len(driver.outcomes["r", 1].token_ids) == 3


# ---------------------------------------------------------------- faults


def test_a_failed_row_ends_only_its_sequence():
    def fail(row):
        return "the logits hold NaN" if row.sample and row.sample.position == 24 and row.token_ids[0] % 2 else None

    driver = Driver(HashBackend(row_error=fail))
    ids = [driver.add(prompt(20, i), greedy(9)) for i in range(6)]
    driver.run()
    failed = [i for i in ids if driver.outcomes[i, 0].error]
    assert 0 < len(failed) < 6
    for i, request_id in enumerate(ids):
        outcome, solo = driver.outcomes[request_id, 0], Driver().ask(prompt(20, i), greedy(9))
        if request_id in failed:
            assert (outcome.finish_reason, outcome.error) == (ERROR, "the logits hold NaN")
            assert outcome.token_ids == solo.token_ids[:4]
        else:
            assert outcome.answer == solo.answer
    assert driver.engine.stats().num_finished[ERROR] == len(failed)


def test_a_failed_step_ends_its_requests_and_nobody_else():
    """C172: those in the step get an error at once, those that only wait are served from clean books."""
    driver = Driver(HashBackend(fail_steps={2}), max_num_seqs=2)
    ids = [driver.add(prompt(20, i), greedy(9)) for i in range(4)]
    driver.run()
    for request_id in ids[:2]:
        outcome = driver.outcomes[request_id, 0]
        assert outcome.finish_reason is ERROR
        assert outcome.error == "the engine failed in a step: RuntimeError: scripted failure of step 2"
        assert len(outcome.token_ids) == 2
    for i, request_id in enumerate(ids[2:], 2):
        assert driver.outcomes[request_id, 0].answer == Driver().ask(prompt(20, i), greedy(9)).answer


def test_a_failed_step_ends_all_samples_and_spares_what_had_no_row():
    driver = Driver(HashBackend(fail_steps={3}), max_num_seqs=3, max_num_batched_tokens=2)
    driver.add(prompt(2), SamplingParams(n=3, max_tokens=9, seed=0), request_id="n")
    spared = driver.add(prompt(30, 1), greedy(5))
    driver.run()
    assert all(driver.outcomes["n", i].finish_reason is ERROR for i in range(3))
    assert driver.outcomes[spared, 0].answer == Driver().ask(prompt(30, 1), greedy(5)).answer


@pytest.mark.parametrize(
    "broken",
    [
        lambda plan: StepResult(()),
        lambda plan: StepResult(tuple(RowResult() for _ in plan.rows)),
        lambda plan: StepResult(tuple(RowResult(token_id=1, scores=(None,)) for _ in plan.rows)),
        lambda plan: None,
    ],
)
def test_results_that_break_the_contract_fail_the_step(broken):
    class Backend(HashBackend):
        def execute(self, plan):
            return broken(plan) if self.num_steps == 0 and not self.keep_trace else super().execute(plan)

    backend = Backend(keep_trace=False)
    driver = Driver(backend)
    outcome = driver.ask(prompt(20))
    assert outcome.finish_reason is ERROR
    backend.keep_trace = True
    assert driver.ask(prompt(20)).finish_reason is FinishReason.LENGTH


def test_error_messages_are_bounded():
    class Backend(HashBackend):
        def execute(self, plan):
            raise ValueError("x" * 10_000)

    assert len(Driver(Backend()).ask(prompt(5)).error) < 300


def test_a_fault_in_planning_ends_everything_visibly(monkeypatch):
    driver = Driver(max_num_seqs=1)
    ids = [driver.add(prompt(20, i), greedy(9)) for i in range(3)]
    driver.step()
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine.scheduler._chunks, "advance_running", lambda draft: 1 / 0)
        driver.step()
    assert all(driver.outcomes[i, 0].finish_reason is ERROR for i in ids)
    check_idle(driver.engine)
    assert len(driver.ask(prompt(20)).token_ids) == 4


# ---------------------------------------------------------------- statistics


def test_usage_counts():
    """C043: two prompts, n = 3, 4 tokens each."""
    driver = Driver()
    for i in range(2):
        driver.add(prompt(5, i), SamplingParams(n=3, max_tokens=4, ignore_eos=True, seed=0))
    driver.run()
    assert sum(len(o.token_ids) for o in driver.outcomes.values()) == 24 == driver.engine.stats().num_generated_tokens


def test_requests_by_reason():
    """C175: 5 aborted, 3 at their limit, 2 stopped."""
    driver = Driver(ScriptBackend(script=lambda spec: 7 if spec.params.max_tokens == 9 else 10))
    ids = [driver.add(prompt(5, i), greedy(9 if i >= 8 else 8), eos_token_ids=frozenset({7})) for i in range(10)]
    driver.step()
    for request_id in ids[:5]:
        driver.engine.abort(request_id)
    driver.run()
    assert driver.engine.stats().num_finished == {
        FinishReason.ABORT: 5,
        FinishReason.LENGTH: 3,
        FinishReason.STOP: 2,
        FinishReason.ERROR: 0,
    }


def test_queue_time_is_counted_once():
    driver = Driver(max_num_seqs=1)
    driver.add(prompt(5), greedy(3))
    driver.add(prompt(5), greedy(3))
    clock = driver.engine._clock
    assert isinstance(clock, VirtualClock)
    driver.run(each=lambda: clock.advance(0.5))
    assert driver.engine.stats().queue_seconds == pytest.approx(1.5)


def test_step_without_work_does_nothing():
    driver = Driver()
    assert driver.step() == []
    assert driver.engine.stats().num_steps == 0
    assert driver.engine.backend.trace == []
