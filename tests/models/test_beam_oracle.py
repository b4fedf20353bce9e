"""Beam search on tiny models: sequences and scores equal those of transformers (C092, C094, C095, C097)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs import new_engine

from octavo.backends.cpu.backend import CpuBackend
from octavo.engine import Engine
from octavo.events import OutputEvent
from octavo.models.loading import load_model
from octavo.request import SamplingParams
from octavo.weights.hub import resolve_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 48
EOS = 7
PROMPTS = [np.random.default_rng(seed).integers(8, VOCAB, size).tolist() for seed, size in ((1, 5), (2, 16), (3, 37))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """EOS is made likely enough to end beams early and unlikely enough to let some run to the limit."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.25, bos_token_id=1, eos_token_id=EOS,
        pad_token_id=0,
    )  # fmt: skip
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        made.lm_head.weight[EOS] += 0.35 * made.lm_head.weight.std()
    made.path = tmp_path_factory.mktemp("tiny")
    made.save_pretrained(made.path)
    return made.eval()


def engine_for(path: Path, **config: Any) -> Engine:
    settings = {"max_model_len": 256, "num_blocks": 64, "max_num_seqs": 16, "max_num_batched_tokens": 64, **config}
    backend = CpuBackend(
        load_model(resolve_model(str(path))),
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        max_model_len=settings["max_model_len"],
        kv_cache_dtype="float32",
        poison=True,
    )
    return new_engine(backend, **settings)


@pytest.fixture(scope="module")
def engine(model: Any) -> Engine:
    return engine_for(model.path)


def search(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[list[OutputEvent]]:
    """Results of all requests, run together."""
    found: dict[str, list[OutputEvent]] = {}
    for i, (prompt, params) in enumerate(requests):
        found[f"r{i}"] = []
        engine.add_request(engine.make_request(f"r{i}", prompt, params, eos_token_ids=frozenset({EOS})))
    while engine.has_unfinished:
        for event in engine.step():
            found[event.request_id].append(event)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return list(found.values())


def oracle(model: Any, prompt: list[int], params: SamplingParams, eos: Any = EOS) -> list[tuple[list[int], float]]:
    """(generated tokens, score) of the results of transformers."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), num_beams=params.num_sequences, num_return_sequences=params.n, do_sample=False,
            max_new_tokens=params.max_tokens, min_new_tokens=params.min_tokens or None, eos_token_id=eos,
            length_penalty=params.length_penalty, early_stopping=params.early_stopping, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
    results = []
    for ids, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        ends = set(np.atleast_1d(eos).tolist())
        stop = next((i + 1 for i, token_id in enumerate(ids) if token_id in ends), len(ids))
        results.append((ids[:stop], score))
    return results


def compare(got: list[OutputEvent], want: list[tuple[list[int], float]]) -> None:
    assert [event.index for event in got] == list(range(len(want)))
    assert [list(event.token_ids) for event in got] == [ids for ids, _ in want]
    np.testing.assert_allclose([event.score for event in got], [score for _, score in want], rtol=2e-4, atol=2e-4)


def beams(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"use_beam_search": True, "n": 4, "max_tokens": 12, "temperature": 0, **fields})


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_penalties_and_stopping(model: Any, engine: Engine, length_penalty: float, early_stopping: Any) -> None:
    """C094: the nine combinations, over several prompts and widths, some of whose beams end early."""
    ends = set()
    for prompt in PROMPTS:
        for width, n in ((2, 2), (4, 4), (5, 3)):
            params = beams(n=n, best_of=width, length_penalty=length_penalty, early_stopping=early_stopping)
            (got,) = search(engine, [(prompt, params)])
            compare(got, oracle(model, prompt, params))
            ends |= {event.finish_reason for event in got}
    assert ends  # both kinds occur over the nine combinations, see the next test


def test_some_beams_stop_and_some_reach_the_limit(engine: Engine) -> None:
    results = search(engine, [(prompt, beams(length_penalty=0.0)) for prompt in PROMPTS])
    assert {event.finish_reason.value for got in results for event in got if event.finish_reason} == {"stop", "length"}


def test_more_end_tokens_need_more_candidates(model: Any, engine: Engine) -> None:
    """Three end tokens: (3 + 1) * width candidates, as transformers takes."""
    for prompt in PROMPTS:
        params = beams(n=3, stop_token_ids=(9, 20))
        (got,) = search(engine, [(prompt, params)])
        compare(got, oracle(model, prompt, params, eos=[EOS, 9, 20]))
        for event in got:
            last = event.token_ids[-1]
            assert event.stop_reason == (last if last in (9, 20) else None)


@pytest.mark.parametrize("width", [8, 16])
def test_wide_beams(model: Any, engine: Engine, width: int) -> None:
    """C095."""
    params = beams(n=width, max_tokens=6)
    (got,) = search(engine, [(PROMPTS[1], params)])
    compare(got, oracle(model, PROMPTS[1], params))


def test_min_tokens(model: Any, engine: Engine) -> None:
    for prompt in PROMPTS:
        params = beams(min_tokens=6)
        (got,) = search(engine, [(prompt, params)])
        compare(got, oracle(model, prompt, params))
        assert all(len(event.token_ids) >= 6 for event in got)


def test_width_one_is_greedy(model: Any, engine: Engine) -> None:
    plain = search(engine, [(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12))])[0]
    one = search(engine, [(PROMPTS[0], beams(n=1))])[0]
    assert [e.token_ids for e in one] == [e.token_ids for e in plain]


def test_searches_together_in_a_small_pool(model: Any, engine: Engine) -> None:
    """C097: four searches and four greedy ones in a pool for two; each equals its solo result, to the bit."""
    requests = [(prompt, beams(n=4, max_tokens=20)) for prompt in (*PROMPTS, PROMPTS[0][::-1])]
    requests += [(prompt, SamplingParams(temperature=0, max_tokens=20, logprobs=1)) for prompt in (*PROMPTS, [9, 9])]
    alone = [search(engine_for(model.path, enable_prefix_caching=False), [one])[0] for one in requests]
    for caching in (True, False):
        small = engine_for(model.path, num_blocks=18, enable_prefix_caching=caching)
        together = search(small, requests)
        for got, want in zip(together, alone, strict=True):
            assert [(e.token_ids, e.logprobs, e.score, e.finish_reason) for e in got] == [
                (e.token_ids, e.logprobs, e.score, e.finish_reason) for e in want
            ]


def test_blocks_of_four_beams_against_four_sequences(engine: Engine) -> None:
    """Beams share their past: after a prompt of 64 tokens, width 4 holds far fewer blocks than four sequences do."""
    prompt = np.random.default_rng(5).integers(8, VOCAB, 64).tolist()
    peaks = []
    for requests in (
        [(prompt, beams(max_tokens=64, ignore_eos=True))],
        [([9 + i, *prompt[1:]], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)) for i in range(4)],
    ):
        for i, (ids, params) in enumerate(requests):
            engine.add_request(engine.make_request(f"r{i}", ids, params))
        peak = 0
        while engine.has_unfinished:
            engine.step()
            peak = max(peak, engine.stats().num_blocks - engine.stats().num_free_blocks)
        peaks.append(peak)
    assert peaks[1] == 4 * 8
    assert peaks[0] <= peaks[1] * 0.6, peaks
