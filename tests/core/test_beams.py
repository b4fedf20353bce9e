"""Beam search: scores, ends, limits, and the books of forking and dropping beams (C092, C094, C095, C097, C119)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run import Driver, check_books, make_engine, preempt_last
from support.script_backend import HashBackend

from octavo.beams import BeamSearch, num_candidates
from octavo.errors import NeverFitsError, RequestError
from octavo.kv.sizing import beam_tokens_that_fit
from octavo.request import FinishReason, Request, SamplingParams

EOS = 9


def prompt(num_tokens, start=0):
    return [(start + 7 * i + i * i) % 128 for i in range(num_tokens)]


def beams(n=3, max_tokens=8, **fields):
    return SamplingParams(n=n, use_beam_search=True, temperature=0, max_tokens=max_tokens, **fields)


def request(params, num_prompt=200, max_tokens=10):
    return Request(
        request_id="r", prompt_token_ids=[5] * num_prompt, params=params, max_tokens=max_tokens, seed=0,
        eos_token_ids=frozenset({EOS}),
    )  # fmt: skip


# ---------------------------------------------------------------- the search itself


def tree(search, steps):
    """Feed the search with tops given by the tokens of a beam."""
    while not search.settled:
        tops = []
        for path, total in zip(search.paths, search.totals, strict=True):
            ids = tuple(e.token_id for e in path.entries()) if path else ()
            tops.append(steps(ids) if total > -math.inf else ())
        search.advance(tops)
    return [([e.token_id for e in h.path.entries()], h.score, h.reason) for h in search.finished]


@pytest.mark.parametrize(("penalty", "best"), [(0.0, 2), (1.0, 8), (2.0, 8)])
def test_the_score_counts_generated_tokens_only(penalty, best):
    """C092: P = 200; one beam of 2 tokens with sum -1.0, one of 8 tokens with sum -1.5."""

    def steps(ids):
        if ids == ():
            return ((1, -0.5), (2, -0.6))
        if ids[0] == 1:
            return ((EOS, -0.5), (3, -20.0))
        return ((EOS, -0.2 if len(ids) == 7 else -30.0), (4, -0.7 / 6 if len(ids) < 7 else -30.0))

    search = BeamSearch(request(beams(2, length_penalty=penalty, early_stopping="never")))
    results = tree(search, steps)
    by_length = {len(ids): score for ids, score, _ in results}
    assert by_length[2] == pytest.approx(-1.0 / 2**penalty)
    assert by_length[8] == pytest.approx(-1.5 / 8**penalty)
    assert len(results[0][0]) == best


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("early", [True, False, "never"])
def test_a_search_ends_at_the_limit(penalty, early):
    """C094: whatever the penalty, ten tokens are the most."""
    search = BeamSearch(request(beams(2, length_penalty=penalty, early_stopping=early)))
    results = tree(search, lambda ids: ((1, -0.1), (2, -0.2), (EOS, -40.0), (3, -50.0)))
    assert search.length == 10
    assert all(len(ids) == 10 and reason is FinishReason.LENGTH for ids, _, reason in results)


def test_candidates_without_probability_are_never_chosen():
    """C095: one finite candidate per beam: the search narrows, and finds what there is."""
    search = BeamSearch(request(beams(4)))
    results = tree(search, lambda ids: ((1, -0.1), (2, -math.inf), (3, -math.inf)))
    assert [ids for ids, _, _ in results] == [[1] * 10]


def test_number_of_candidates():
    assert num_candidates(request(beams(4))) == 8
    assert num_candidates(request(beams(4, ignore_eos=True))) == 8
    assert num_candidates(request(beams(4, stop_token_ids=(1, 2, EOS)))) == 16
    assert num_candidates(request(beams(4, stop_token_ids=(1, 2), min_tokens=3))) == 19


@given(st.integers(1, 200), st.integers(2, 8), st.integers(1, 40), st.integers(1, 16))
def test_as_many_tokens_as_fit(num_prompt, width, num_blocks, block_size):
    """One token more would not fit, with all blocks after the prompt's full ones private."""

    def needed(num_tokens):
        if num_tokens == 1:
            return -(-num_prompt // block_size)
        shared = num_prompt // block_size
        return shared + width * (-(-(num_prompt + num_tokens - 1) // block_size) - shared)

    fitting = beam_tokens_that_fit(num_prompt, width, num_blocks, block_size)
    assert fitting == 0 or needed(fitting) <= num_blocks
    assert needed(fitting + 1) > num_blocks


# ---------------------------------------------------------------- in the engine


def results_of(driver, request_id, n=3):
    return [driver.outcomes[request_id, i].answer for i in range(n)]


def test_results_come_at_the_end_in_order():
    driver = Driver()
    request_id = driver.add(prompt(40), beams(3, 6, logprobs=2), eos_token_ids=frozenset({EOS}))
    driver.run()
    outcomes = [driver.outcomes[request_id, i] for i in range(3)]
    assert len(driver.outcomes) == 3
    assert [o.num_events for o in outcomes] == [1, 1, 1]
    assert [len(o.logprobs) for o in outcomes] == [len(o.token_ids) for o in outcomes]
    assert all(len(entry.top) == 2 for o in outcomes for entry in o.logprobs)
    means = [sum(e.logprob for e in o.logprobs) / len(o.logprobs) for o in outcomes]
    assert means == sorted(means, reverse=True)
    assert len({tuple(o.token_ids) for o in outcomes}) == 3
    assert driver.engine.stats().num_prompt_tokens == 40


def exhaustive(backend, tokens, depth):
    """The most probable continuation of `depth` tokens, by trying all that have a logit."""
    from support.script_backend import digest

    def context(ids):
        import hashlib

        chain, value = hashlib.blake2b(digest_size=16), b""
        for token_id in ids:
            value = digest(value, token_id)
            chain.update(value)
        return chain.digest()

    def best(ids, left):
        if not left:
            return 0.0, ()
        logits = backend.score_logits(digest(context(ids), (), ()))
        total = math.log(sum(map(math.exp, logits.values())) + backend.vocab_size - len(logits))
        found = max(
            ((logit - total + rest, (token_id, *tail))
             for token_id, logit in logits.items() for rest, tail in [best([*ids, token_id], left - 1)])
        )  # fmt: skip
        return found

    return best(tokens, depth)


def test_a_wide_search_finds_the_most_probable_text():
    """Four tokens have a logit above 0 in each context, so 64 beams miss nothing in three steps."""
    backend = HashBackend(vocab_size=256)
    driver = Driver(backend, max_num_seqs=64)
    request_id = driver.add(prompt(10), beams(64, 3, length_penalty=0.0))
    driver.run()
    total, ids = exhaustive(backend, prompt(10), 3)
    outcome = driver.outcomes[request_id, 0]
    assert tuple(outcome.token_ids) == ids
    assert sum(e.logprob for e in outcome.logprobs) == pytest.approx(total)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("config", [
    {"num_blocks": 18}, {"num_blocks": 11, "max_num_batched_tokens": 5}, {"max_num_seqs": 3},
    {"num_blocks": 24, "max_num_seqs": 6, "scheduling_policy": "priority"},
], ids=str)  # fmt: skip
def test_many_searches_in_a_small_pool(config, caching):
    """C097: with others around, preempted and started again, each finds what it finds alone."""
    driver = Driver(HashBackend(keep_trace=False), enable_prefix_caching=caching, **config)
    asked = []
    for i in range(6):
        params = beams(3, 20, min_tokens=i) if i % 3 else SamplingParams(n=2, seed=i, max_tokens=25)
        options = {"eos_token_ids": frozenset(range(4)), "priority": -i}
        asked.append((driver.add(prompt(20 + 7 * i, i % 2), params, **options), params, i, options))
        driver.step()
    driver.run()
    for request_id, params, i, options in asked:
        solo = Driver(HashBackend(keep_trace=False), num_blocks=config.get("num_blocks", 256))
        solo.add(prompt(20 + 7 * i, i % 2), params, request_id="r", **options)
        solo.run()
        assert results_of(driver, request_id, params.n) == results_of(solo, "r", params.n)


@pytest.mark.parametrize("when", [[1], [2], [3, 4], [2, 9], [12]], ids=str)
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_beams_start_again_together(when, caching):
    solo = Driver()
    solo.add(prompt(50), beams(4, 20), request_id="r")
    solo.run()
    driver = Driver(max_num_batched_tokens=24, enable_prefix_caching=caching)
    driver.add(prompt(50), beams(4, 20), request_id="r")

    def preempt():
        if driver.num_steps in when:
            preempt_last(driver.engine)
            assert not driver.engine.scheduler.running

    driver.run(each=preempt)
    assert results_of(driver, "r", 4) == results_of(solo, "r", 4)


def test_abort_and_faults_of_a_search():
    """Only the results that a client knows of have events; nothing is left."""
    driver = Driver(HashBackend(fail_steps={5}))
    wide = SamplingParams(n=2, best_of=4, use_beam_search=True, max_tokens=30)
    driver.add(prompt(40), wide, request_id="gone")
    driver.step()
    driver.step()
    driver.engine.finish_sequence("gone", 0)  # nobody can have found a stop in what was not told
    driver.step()
    driver.engine.abort("gone")
    driver.step()
    driver.add(prompt(40), wide, request_id="fails")
    driver.run()
    for request_id, reason in (("gone", FinishReason.ABORT), ("fails", FinishReason.ERROR)):
        assert {key[1] for key in driver.outcomes if key[0] == request_id} == {0, 1}
        assert all(driver.outcomes[request_id, i].finish_reason is reason for i in range(2))
    assert driver.engine.scheduler.line.searches == {}
    bad = Driver(HashBackend(row_error=lambda row: "NaN" if row.start == 45 and row.block_ids[0] % 1 == 0 else None))
    bad.add(prompt(40), wide, request_id="r")
    bad.run()
    assert [bad.outcomes["r", i].error for i in range(2)] == ["NaN", "NaN"]


def test_prompt_logprobs_come_before_the_results():
    driver = Driver(max_num_batched_tokens=16)
    driver.add(prompt(40), beams(3, 6, prompt_logprobs=1), request_id="r")
    driver.run()
    plain = Driver().ask(prompt(40), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    assert driver.outcomes["r", 0].prompt_logprobs == plain.prompt_logprobs
    assert driver.outcomes["r", 1].prompt_logprobs == []


def test_width_one_is_greedy():
    one = Driver().ask(prompt(20), beams(1, 9, length_penalty=2.0, early_stopping=True))
    assert one.token_ids == Driver().ask(prompt(20), SamplingParams(temperature=0, max_tokens=9)).token_ids


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(("fields", "param"), [
    ({"n": 65}, "n"), ({"best_of": 100}, "best_of"), ({"temperature": 0.5}, "temperature"), ({"top_p": 0.9}, "top_p"),
    ({"top_k": 5}, "top_k"), ({"min_p": 0.1}, "min_p"), ({"presence_penalty": 1.0}, "presence_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"), ({"logit_bias": {1: 1.0}}, "logit_bias"),
    ({"stop": ["x"]}, "stop"), ({"max_tokens": 0}, "max_tokens"), ({"length_penalty": math.nan}, "length_penalty"),
    ({"length_penalty": 11}, "length_penalty"), ({"length_penalty": "1"}, "length_penalty"),
    ({"early_stopping": "ever"}, "early_stopping"), ({"early_stopping": 1}, "early_stopping"),
    ({"use_beam_search": 1}, "use_beam_search"), ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
])  # fmt: skip
def test_what_has_no_meaning_in_a_search_is_refused(fields, param):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{"n": 2, "use_beam_search": True, "temperature": 0, **fields})
    assert caught.value.param == param


def test_what_the_server_cannot_search():
    """C095: width V works with its 2 V candidates only if there are so many."""
    engine = make_engine(HashBackend(vocab_size=32), max_num_seqs=40)
    engine.make_request("r", [1], beams(16))
    for n in (17, 41):
        with pytest.raises(RequestError) as caught:
            engine.make_request("r", [1], beams(n))
        assert caught.value.param == "n"
    with pytest.raises(RequestError, match="at most 4 with use_beam_search on this server"):
        make_engine(max_num_batched_tokens=4, max_num_seqs=9).make_request("r", [1], beams(5))


def test_a_search_that_never_fits_is_refused_with_the_arithmetic():
    engine = make_engine(num_blocks=10)
    with pytest.raises(NeverFitsError, match=r"50 tokens and one token of each of 8 answers needs 11 KV blocks .* 10 "):
        engine.make_request("r", prompt(50), beams(8, 5))
    assert engine.make_request("r", prompt(50), beams(7, 500)).max_tokens == 15
    assert engine.make_request("r", prompt(50), beams(3, 100)).max_tokens == 3 * 16 + 2 * 16 - 50 + 1


@pytest.mark.parametrize("width", [2, 3, 7])
@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 50])
def test_a_search_that_just_fits_needs_nobody_to_leave(num_prompt, width):
    """Clamped to what fits, it runs to its end in a pool of its own."""
    for num_blocks in (width + num_prompt // 16, width * 3 + num_prompt // 16):
        driver = Driver(num_blocks=num_blocks)
        driver.add(prompt(num_prompt), beams(width, 500), request_id="r")
        driver.run()
        assert driver.engine.stats().num_preemptions == 0
        assert driver.outcomes["r", 0].finish_reason is FinishReason.LENGTH


def test_books_while_a_step_is_in_flight():
    driver = Driver()
    driver.add(prompt(20), beams(3, 9), request_id="r")
    scheduler = driver.engine.scheduler
    for _ in range(4):
        plan = scheduler.plan(0.0)
        result = driver.engine.backend.execute(plan)
        scheduler.commit(plan, result)
        check_books(driver.engine)
    plan = scheduler.plan(0.0)
    result = driver.engine.backend.execute(plan)
    driver.engine.abort("r")
    assert {e.finish_reason for e in scheduler.commit(plan, result)} == {FinishReason.ABORT}
    driver.run()


@pytest.mark.parametrize(("num_prompt", "num_tokens"), [(64, 64), (256, 64)])
def test_a_search_holds_less_than_half_of_what_separate_sequences_hold(num_prompt, num_tokens):
    """Most blocks held at once; the paper on paged attention reports up to 55 % less for beams."""

    def most_blocks(driver):
        most = 0
        while driver.engine.has_unfinished:
            driver.step()
            most = max(most, driver.engine.scheduler.tables.pool.num_used)
        return most

    search, separate = Driver(HashBackend(keep_trace=False)), Driver(HashBackend(keep_trace=False))
    search.add(prompt(num_prompt), beams(4, num_tokens))
    for i in range(4):
        separate.add(prompt(num_prompt, 1 + i), SamplingParams(temperature=0, max_tokens=num_tokens))
    assert most_blocks(search) <= 0.5 * most_blocks(separate)
