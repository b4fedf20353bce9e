"""Native samplers against the reference, and the reference against arithmetic done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("octavo._native")

from ops.native_sampler import BAD_ROW, NOTHING_ALLOWED, OK, isas, native_params, run, run_one, score_one, spec

from octavo import _native
from octavo.plan import SampleSpec
from octavo.request import SamplingParams
from octavo.sampling import adjusted_logits, draw, filtered_weights, order, philox4x32, sample, score, uniform

ISAS = isas()
EPS = 2.0**-24  # half a unit in the last place of a float32

each_isa = pytest.mark.parametrize("isa", ISAS)


def row(*logits: float) -> np.ndarray:
    return np.array(logits, np.float32)


def normal_row(vocab_size: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * scale).astype(np.float32)


# ---- Where float32 may rightly decide otherwise than float64


def weight_errors(x: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Weights [vocab] before all filters and, for each, how far its native value and its part in sums may be off.

    A native weight exp((x - max) / t) has three roundings before the exp, so its relative error is at most
    3 |exponent| EPS, and that of the exp itself, below 8 EPS (8 more allow for a scalar exp without fused
    multiply-add). Sums of 1,024 such weights in 64 strands add 16 roundings and 6 in the tree.
    """
    exponents = np.maximum((x.astype(np.float64) - float(x.max())) / params.temperature, -87.33)
    weights = np.exp(exponents)
    return weights, weights * (3 * np.abs(exponents) + 16 + 22) * EPS


def decided(x: np.ndarray, params: SamplingParams, u: float) -> bool:
    """Whether every decision of a draw has a margin above what float32 can get wrong."""
    weights, errors = weight_errors(x, params)
    error = 3 * float(errors.sum())  # two sums are compared each time
    best_first = order(x)
    keep = params.top_k if 0 < params.top_k < len(x) else len(x)
    if 0 < params.top_p < 1:
        cumulative = np.cumsum(weights[best_first[:keep]])
        if np.abs(cumulative - np.float32(params.top_p) * cumulative[-1]).min() <= error:
            return False
    if np.any(np.abs(weights - np.float32(params.min_p)) <= errors):
        return False
    survivors = filtered_weights(x, params)
    cumulative = np.cumsum(survivors)
    inner = cumulative[survivors > 0][:-1]  # the borders at 0 and at the total need no margin: u lies in [0, 1)
    return inner.size == 0 or float(np.abs(inner - u * cumulative[-1]).min()) > error


def check_near(isa: str, x: np.ndarray, s: SampleSpec) -> None:
    """For rows too flat to be decided: the drawn token lies where the running sum passes u, give or take errors.

    Sums may be off by `error`, and as much weight and one token more may fall on the other side of a filter.
    """
    token_id = run_one(isa, x, s).token_id
    weights, errors = weight_errors(x, s.params)
    survivors = filtered_weights(x, s.params)
    wavering = weights[np.abs(weights - np.float32(s.params.min_p)) <= errors].sum()
    slack = 3 * float(errors.sum()) + 2 * float(survivors[survivors > 0].min()) + float(wavering)
    cumulative = np.cumsum(survivors)
    target = uniform(s.seed, s.sample_index, s.position) * cumulative[-1]
    assert cumulative[token_id] - survivors[token_id] - slack <= target <= cumulative[token_id] + slack
    assert slack < 1e-2 * cumulative[-1]


def check_against_reference(isa: str, logits: np.ndarray, s: SampleSpec, allowed: np.ndarray | None = None) -> None:
    want = sample(logits, s, allowed)
    got = run_one(isa, logits, s, allowed)
    if want.error is not None:
        assert got.status != OK
        return
    assert got.status == OK
    assert got.token_id == want.token_id
    if want.logprobs is not None:
        assert got.rank == want.logprobs.rank
        assert [t for t, _ in got.top] == [t for t, _ in want.logprobs.top]
        check_logprobs([(got.token_id, got.logprob), *got.top], logits)


def check_logprobs(pairs: list[tuple[int, float]], logits: np.ndarray) -> None:
    """Each sum of weights has a relative error of at most (3 * 88 + 38) EPS, hence also its log; then one rounding."""
    x = logits.astype(np.float64)
    exact = x - x.max() - math.log(np.exp(x - x.max()).sum())
    for token_id, logprob in pairs:
        want = exact[token_id]
        if math.isinf(want):
            assert logprob == want
        else:
            assert logprob == pytest.approx(want, rel=EPS, abs=302 * EPS)


# ---- The random numbers


# Known answers of Philox4x32-10 published with the Random123 library: zeros, ones, digits of pi.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, want):
    assert philox4x32(counter, key) == want
    assert _native.philox4x32(*counter, *key) == want


@given(st.integers(0, 2**64 - 1), st.integers(0, 127), st.integers(0, 2**31))
def test_uniform_is_the_same_natively(seed, sample_index, position):
    u = uniform(seed, sample_index, position)
    assert 0.0 <= u < 1.0
    assert _native.sample_uniform(seed, sample_index, position) == u
    assert uniform(seed - 2**64, sample_index, position) == u


def test_every_part_of_the_counter_matters():
    base = uniform(1, 0, 0)
    assert len({base, uniform(2, 0, 0), uniform(1 + 2**32, 0, 0), uniform(1, 1, 0), uniform(1, 0, 1)}) == 5


def test_uniform_is_uniform():
    """20,000 draws in 50 bins: chi-square of 49 degrees exceeds 115 once in a million seeds; ours is fixed."""
    for draws in (
        [uniform(7, 0, position) for position in range(20_000)],
        [uniform(seed, 0, 5) for seed in range(20_000)],
    ):
        counts = np.bincount((np.array(draws) * 50).astype(int), minlength=50)
        assert ((counts - 400) ** 2 / 400).sum() < 115


# ---- Native against reference


@st.composite
def rows_of_logits(draw_from):
    vocab_size = draw_from(st.sampled_from([1, 2, 5, 15, 16, 17, 63, 64, 65, 100, 1000, 1024, 1025, 4999]))
    x = normal_row(vocab_size, draw_from(st.integers(0, 2**32 - 1)), draw_from(st.sampled_from([0.1, 1.0, 4.0, 20.0])))
    shape = draw_from(st.sampled_from(["plain", "ties", "holes", "offset"]))
    if shape == "ties":
        x = np.round(x)
    elif shape == "holes":
        x[np.random.default_rng(vocab_size).random(vocab_size) < 0.4] = -np.inf
    elif shape == "offset":
        x += np.float32(300)
    return x


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0, 30.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 40, 64, 1000, 100_000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 0.9]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, 5000), st.floats(-100, 100, width=32), max_size=3),
    logprobs=st.sampled_from([None, 0, 1, 5, 20]),
)
ids = st.lists(st.integers(0, 5100), max_size=12)


@each_isa
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(rows_of_logits(), sampling_params, st.integers(0, 2**64 - 1), ids, ids, ids, st.integers(0, 3))
def test_native_equals_reference(isa, logits, params, seed, prompt, output, banned, mask_seed):
    # The mask allows a random half of the tokens, in half of the examples.
    allowed = np.random.default_rng(mask_seed).random(len(logits)) < 0.5 if mask_seed > 1 else None
    if params.logprobs is not None and params.logprobs > len(logits):
        params = SamplingParams(temperature=params.temperature, logprobs=min(len(logits), 20))
    small = [t % (len(logits) + 3) for t in output]  # a few of them past the vocabulary: passed over
    s = spec(params, seed=seed, position=len(prompt) + len(output), prompt=prompt, output=small, banned=banned)
    x = adjusted_logits(logits, params, prompt, small, banned, allowed)
    if np.isfinite(x).any() and np.isfinite(logits).any() and not params.greedy:
        assume(decided(x, params, uniform(s.seed, s.sample_index, s.position)))
    check_against_reference(isa, logits, s, allowed)


LARGE = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=0.5, logprobs=5),
    SamplingParams(temperature=1.0, top_p=0.9),  # 64 candidates do not suffice, nor do 256 on the flat row
    SamplingParams(temperature=1.0, top_p=0.9999),
    SamplingParams(temperature=1.5, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=1000),
    SamplingParams(temperature=1.0, top_k=30_000, top_p=0.7),
]


@each_isa
@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0], ids=["uniform", "flat", "peaked"])
def test_native_equals_reference_on_a_real_vocabulary(isa, scale):
    logits = normal_row(49_152, 5, scale)
    for params in LARGE:
        for position in range(3):
            s = spec(params, seed=11, position=position)
            # Equal logits all weigh exactly 1, so that no sum rounds and every decision is exact.
            if params.greedy or scale == 0.0 or decided(logits, params, uniform(11, 0, position)):
                check_against_reference(isa, logits, s)
            else:
                check_near(isa, logits, s)


@each_isa
def test_draws_follow_the_distribution(isa):
    """20,000 draws of 8 tokens: chi-square of 7 degrees exceeds 42 less than once in a million; the seed is fixed."""
    logits = np.log(row(0.3, 0.2, 0.15, 0.12, 0.1, 0.07, 0.05, 0.01))
    params = SamplingParams(temperature=1.0)
    rows = [native_params(spec(params, seed=3, position=position)) for position in range(20_000)]
    drawn = run(isa, np.tile(logits, (len(rows), 1)), rows)
    counts = np.bincount([out.token_id for out in drawn], minlength=8)
    expected = np.exp(logits.astype(np.float64)) * len(rows)
    assert ((counts - expected) ** 2 / expected).sum() < 42


@each_isa
def test_filtered_draws_follow_the_renormalised_distribution(isa):
    # top_k leaves .4 .3 .2; of their .9, top_p .7 needs .63: the first two, drawn 4 : 3.
    logits = np.log(row(0.1, 0.3, 0.4, 0.2))
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.7)
    rows = [native_params(spec(params, seed=9, position=position)) for position in range(7_000)]
    counts = np.bincount([out.token_id for out in run(isa, np.tile(logits, (len(rows), 1)), rows)], minlength=4)
    assert counts[0] == counts[3] == 0
    assert abs(counts[2] - 4_000) < 5 * math.sqrt(7_000 * 4 / 7 * 3 / 7)


# ---- Filters by hand


def survivors(logits: np.ndarray, **params) -> list[int]:
    return np.flatnonzero(filtered_weights(logits, SamplingParams(temperature=1.0, **params))).tolist()


def test_survivors_by_hand():
    p = np.log(row(0.05, 0.4, 0.15, 0.3, 0.1))
    assert survivors(p) == [0, 1, 2, 3, 4]
    assert survivors(p, top_k=2) == [1, 3]
    assert survivors(p, top_p=0.69) == [1, 3]
    assert survivors(p, top_p=0.71) == [1, 2, 3]
    assert survivors(p, top_p=0.0) == [1]
    assert survivors(p, min_p=0.3) == [1, 2, 3]
    # Alone, .8 needs .4 + .3 + .15; of the .85 that top_k 3 leaves, it needs .68: .4 + .3.
    assert survivors(p, top_p=0.8) == [1, 2, 3]
    assert survivors(p, top_p=0.8, top_k=3) == [1, 3]


def test_ties_at_the_border_go_to_the_lowest_ids():
    flat = row(1, 2, 1, 2, 1)
    assert survivors(flat, top_k=3) == [0, 1, 3]
    assert survivors(flat, min_p=1.0) == [1, 3]
    assert survivors(np.zeros(10, np.float32), top_p=0.35) == [0, 1, 2, 3]


@each_isa
def test_native_survivors_by_hand(isa):
    """Every survivor is drawn at some position, and nothing else ever is."""
    cases = [
        (np.log(row(0.05, 0.4, 0.15, 0.3, 0.1)), {"top_k": 2}),
        (np.log(row(0.05, 0.4, 0.15, 0.3, 0.1)), {"top_p": 0.69}),
        (np.log(row(0.05, 0.4, 0.15, 0.3, 0.1)), {"top_p": 0.8, "top_k": 3}),
        (np.log(row(0.05, 0.4, 0.15, 0.3, 0.1)), {"min_p": 0.3}),
        (row(1, 2, 1, 2, 1), {"top_k": 3}),
        (row(1, 2, 1, 2, 1), {"min_p": 1.0}),
        (np.zeros(10, np.float32), {"top_p": 0.35}),
        (np.zeros(200, np.float32), {"top_p": 0.0}),
    ]
    for logits, filters in cases:
        params = SamplingParams(temperature=1.0, **filters)
        rows = [native_params(spec(params, seed=1, position=position)) for position in range(300)]
        drawn = {out.token_id for out in run(isa, np.tile(logits, (300, 1)), rows)}
        assert sorted(drawn) == survivors(logits, **filters), filters


@each_isa
def test_zero_temperature_is_argmax_whatever_the_rest(isa):
    logits = normal_row(100, 1)
    logits[[17, 60]] = logits.max() + 1  # a tie: the lowest id
    for top_p in (0.0, 1.0):
        for top_k in (-1, 0, 1, 100, 101):
            s = spec(SamplingParams(temperature=0.0, top_p=top_p, top_k=top_k), seed=top_k + 1)
            assert run_one(isa, logits, s).token_id == 17
            assert sample(logits, s).token_id == 17


@each_isa
def test_filters_that_are_off_change_nothing(isa):
    logits = normal_row(1000, 2)
    for position in range(50):
        want = run_one(isa, logits, spec(SamplingParams(temperature=1.0), position=position)).token_id
        for off in ({"top_k": 0}, {"top_k": -1}, {"top_k": 1000}, {"top_k": 1001}, {"top_p": 1.0}, {"min_p": 0.0}):
            got = run_one(isa, logits, spec(SamplingParams(temperature=1.0, **off), position=position))
            assert got.token_id == want, off


@each_isa
def test_top_p_zero_is_argmax(isa):
    logits = normal_row(5000, 3)
    for position in range(20):
        got = run_one(isa, logits, spec(SamplingParams(temperature=1.0, top_p=0.0), position=position))
        assert got.token_id == int(np.argmax(logits))


@each_isa
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-20, 1e-6])
def test_tiny_temperatures_do_not_overflow(isa, temperature):
    logits = normal_row(500, 4)
    for filters in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        s = spec(SamplingParams(temperature=temperature, **filters), seed=8)
        got = run_one(isa, logits, s)
        assert (got.status, got.token_id) == (OK, int(np.argmax(logits)))
        assert sample(logits, s).token_id == got.token_id


@each_isa
def test_extreme_but_finite_logits(isa):
    logits = row(-3.4e38, 3.4e38, 0.0, -np.inf, 3.3e38)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, logprobs=3)):
        got = run_one(isa, logits, spec(params))
        assert (got.status, got.token_id) == (OK, 1)
    assert [t for t, _ in got.top] == [1, 4, 2]
    assert got.logprob == 0.0


@each_isa
def test_negative_zero_ties_with_zero(isa):
    assert run_one(isa, row(-1, -0.0, 0.0), spec(SamplingParams(temperature=0.0))).token_id == 1
    got = score_one(isa, row(0.0, -0.0, 0.0), 1, 3)
    assert got.rank == 2
    assert [t for t, _ in got.top] == [0, 1, 2]


# ---- Penalties, bias, bans, mask


def test_presence_and_frequency_count_generated_tokens_only():
    a, b = 0, 1
    logits = row(1.0, 0.9)
    for params in (SamplingParams(presence_penalty=0.2), SamplingParams(frequency_penalty=0.2)):
        assert adjusted_logits(logits, params, prompt_ids=[a, a, a]).tolist() == logits.tolist()
        assert (
            adjusted_logits(logits, params, output_ids=[a]).tolist()
            == row(np.float32(1) - np.float32(0.2), 0.9).tolist()
        )
    twice = adjusted_logits(logits, SamplingParams(frequency_penalty=0.25, presence_penalty=0.5), output_ids=[a, b, a])
    assert twice.tolist() == row(1.0 - 0.25 * 2 - 0.5, np.float32(0.9) - np.float32(0.25) - np.float32(0.5)).tolist()


def test_repetition_counts_prompt_and_generated_once():
    params = SamplingParams(repetition_penalty=2.0)
    got = adjusted_logits(row(1.0, -1.0, 3.0, 0.0, 5.0), params, prompt_ids=[0, 0, 1], output_ids=[1, 2, 0])
    assert got.tolist() == [0.5, -2.0, 1.5, 0.0, 5.0]


@each_isa
def test_which_tokens_the_penalties_count(isa):
    logits, prompt = row(1.0, 0.9), [0, 0, 0]

    def greedy(output: list[int], **penalties: float) -> int:
        s = spec(SamplingParams(temperature=0.0, **penalties), prompt=prompt, output=output)
        assert sample(logits, s).token_id == run_one(isa, logits, s).token_id
        return run_one(isa, logits, s).token_id

    assert greedy([], presence_penalty=0.2) == 0
    assert greedy([0], presence_penalty=0.2) == 1
    assert greedy([0, 1], presence_penalty=0.2) == 0
    assert greedy([], frequency_penalty=0.2) == 0
    assert greedy([0], frequency_penalty=0.2) == 1
    assert greedy([0, 1], frequency_penalty=0.2) == 0
    assert greedy([0, 1, 0], frequency_penalty=0.2) == 1
    assert greedy([], repetition_penalty=1.2) == 1


@each_isa
def test_repetition_pushes_negative_logits_down(isa):
    s = spec(SamplingParams(temperature=0.0, repetition_penalty=1.2), prompt=[0])
    assert run_one(isa, row(-1.0, -1.1), s).token_id == 1


@each_isa
def test_bias_bans_and_mask(isa):
    logits = row(3.0, 2.0, 1.0, 0.0)
    biased = SamplingParams(temperature=0.0, logit_bias={3: 10.0, 99: 50.0})
    assert run_one(isa, logits, spec(biased)).token_id == 3
    assert run_one(isa, logits, spec(biased, banned=[3, 0, 77, -5])).token_id == 1
    allowed = np.array([False, False, True, False])
    assert run_one(isa, logits, spec(biased), allowed).token_id == 2
    for position in range(20):
        s = spec(SamplingParams(temperature=5.0), position=position, banned=[0])
        assert run_one(isa, logits, s, np.array([True, True, False, False])).token_id == 1


# ---- Logprobs


@each_isa
def test_logprobs_are_of_the_row_as_given(isa):
    logits = normal_row(777, 6)
    params = SamplingParams(temperature=0.7, top_k=3, logprobs=4, repetition_penalty=1.5, logit_bias={5: 100.0})
    got = run_one(isa, logits, spec(params, prompt=[1, 2, 3], output=[7]))
    assert got.token_id == 5
    want = score(logits, 5, 4)
    assert got.rank == want.rank
    assert [t for t, _ in got.top] == [t for t, _ in want.top]
    check_logprobs([(5, got.logprob), *got.top], logits)


@each_isa
def test_the_drawn_token_may_lie_outside_the_top_list(isa):
    logits = row(3.0, 2.5, 2.0, 1.0)
    s = spec(SamplingParams(temperature=0.0, logprobs=2), banned=[0, 1])
    got = run_one(isa, logits, s)
    assert (got.token_id, got.rank) == (2, 3)
    assert [t for t, _ in got.top] == [0, 1]
    want = sample(logits, s).logprobs
    assert want is not None
    assert (want.token_id, want.rank, [t for t, _ in want.top]) == (2, 3, [0, 1])
    assert got.logprob == pytest.approx(want.logprob, abs=1e-6)


@each_isa
def test_zero_logprobs_still_score_the_token(isa):
    got = run_one(isa, row(0.0, 0.0), spec(SamplingParams(temperature=0.0, logprobs=0)))
    assert got.logprob == pytest.approx(-math.log(2), abs=1e-7)
    assert (got.rank, got.top) == (1, ())


@each_isa
def test_ranks_and_top_of_equals_go_by_id(isa):
    logits = np.round(normal_row(300, 7, 1.0))
    want_order = order(logits).tolist()
    for target in range(0, 300, 13):
        got = score_one(isa, logits, target, 20)
        assert got.rank == want_order.index(target) + 1
        assert [t for t, _ in got.top] == want_order[:20]
        assert got.token_id == target


@each_isa
def test_scores_of_impossible_tokens(isa):
    logits = row(1.0, -np.inf, 2.0, -np.inf)
    got = score_one(isa, logits, 3, 4)
    assert (got.status, got.logprob, got.rank) == (OK, -math.inf, 4)
    assert [t for t, _ in got.top] == [2, 0, 1, 3]
    assert [lp for _, lp in got.top][2:] == [-math.inf, -math.inf]


@each_isa
def test_a_top_list_longer_than_the_vocabulary_is_padded(isa):
    got = score_one(isa, row(1.0, 2.0), 0, 4)
    assert [t for t, _ in got.top] == [1, 0, -1, -1]


# ---- Faults


@each_isa
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("vocab_size", [1, 64, 1000])
def test_a_bad_row_fails_alone(isa, bad, vocab_size):
    logits = np.stack([normal_row(vocab_size, seed) for seed in range(3)])
    for at in {0, vocab_size // 2, vocab_size - 1}:
        spoiled = logits.copy()
        spoiled[1, at] = bad
        for params in (SamplingParams(temperature=0.0, logprobs=1), SamplingParams(temperature=1.0, top_p=0.9)):
            s = spec(params, banned=[at] if vocab_size > 1 else [])
            got = run(isa, spoiled, [native_params(s)] * 3)
            assert [out.status for out in got] == [OK, BAD_ROW, OK]
            clean = run(isa, logits, [native_params(s)] * 3)
            assert (got[0], got[2]) == (clean[0], clean[2])
            assert sample(spoiled[1], s).error is not None


@each_isa
def test_nothing_allowed(isa):
    params = SamplingParams(temperature=1.0)
    for s, logits, allowed in (
        (spec(params), row(-np.inf, -np.inf), None),
        (spec(params, banned=[0, 1]), row(1.0, 2.0), None),
        (spec(params, banned=[0]), row(1.0, 2.0), np.array([True, False])),
    ):
        assert run_one(isa, logits, s, allowed).status == NOTHING_ALLOWED
        assert sample(logits, s, allowed).error == "no token is allowed"
    assert score_one(isa, row(1.0, 2.0), 2, 0).status == NOTHING_ALLOWED
    assert score_one(isa, row(1.0, 2.0), -1, 0).status == NOTHING_ALLOWED


def test_the_binding_refuses_nonsense():
    logits = np.zeros((1, 4), np.float32)
    with pytest.raises(ValueError, match="instruction set"):
        _native.sample("abacus", logits, [{}])
    with pytest.raises(ValueError, match="one dict"):
        _native.sample(ISAS[0], logits, [])
    with pytest.raises(KeyError):
        _native.sample(ISAS[0], logits, [{"temperatur": 1.0}])
    with pytest.raises(ValueError, match="differ in length"):
        _native.sample(ISAS[0], logits, [{"bias_ids": [1]}])


# ---- Law 1: the bits of a row's result depend on the row alone


@each_isa
def test_neighbours_order_and_alignment_change_no_bit(isa):
    vocab_size = 1003  # odd: every row of the matrix starts at another alignment
    logits = np.stack([normal_row(vocab_size, seed, 1.0 + seed % 3) for seed in range(24)])
    rows = []
    for i in range(24):
        params = LARGE[i % len(LARGE)]
        params = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, logprobs=i % 6)
        rows.append(native_params(spec(params, seed=i, position=3 * i, output=[i, i, 5])))
    together = run(isa, logits, rows)
    backwards = run(isa, logits[::-1], rows[::-1])[::-1]
    alone = [run(isa, logits[i : i + 1], rows[i : i + 1])[0] for i in range(24)]
    assert together == backwards == alone


@each_isa
def test_asking_for_logprobs_does_not_change_the_token(isa):
    logits = normal_row(2000, 9)
    for position in range(30):
        tokens = {
            run_one(
                isa, logits, spec(SamplingParams(temperature=1.0, top_p=0.9, logprobs=k), position=position)
            ).token_id
            for k in (None, 0, 5)
        }
        assert len(tokens) == 1


def test_reference_draw_at_the_ends():
    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert draw(weights, 0.0) == 1
    assert draw(weights, 0.2499) == 1
    assert draw(weights, 0.25) == 3
    assert draw(weights, 1.0 - 2.0**-53) == 3
