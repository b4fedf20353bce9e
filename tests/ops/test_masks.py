"""Masks of grammars through the native step: rows with and without one in the same step."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiny_models import TINY_CONFIG

from octavo import _native
from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.inputs import flatten
from octavo.models.loading import load_model
from octavo.plan import PlanRow, SampleSpec, StepPlan
from octavo.request import SamplingParams
from octavo.weights.hub import resolve_model

VOCAB = 40  # not a multiple of 32: the last word is partly unused
BITS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> object:
    import json

    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps({**TINY_CONFIG, "architectures": ["LlamaForCausalLM"]}))
    return load_model(resolve_model(str(directory), load_format="dummy"), load_format="dummy", dummy_format="F32")


def backend_of(model: object, isa: str) -> CpuBackend:
    made = CpuBackend(model, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, isa=isa)  # type: ignore[arg-type]
    made.allocate_kv(8)
    return made


def mask_of(ids: set[int]) -> bytes:
    return sum(1 << i for i in ids).to_bytes(BITS // 8, "little")


def row(block: int, params: SamplingParams, mask: bytes | None, position: int = 3) -> PlanRow:
    ids = [1, 2, 3]
    return PlanRow(ids, 0, [block], SampleSpec(params, 5, 0, position, ids, 3, (), mask))


@pytest.mark.parametrize("isa", _native.available_isas())
def test_only_masked_tokens_are_drawn(model: object, isa: str) -> None:
    backend = backend_of(model, isa)
    hot, greedy = SamplingParams(temperature=50.0, logprobs=3), SamplingParams(temperature=0, logprobs=3)
    for position in range(20):
        rows = [
            row(0, hot, None, position),
            row(1, hot, mask_of({3, 33, 39}), position),
            row(2, greedy, mask_of({17}), position),
            row(3, greedy, None, position),
            row(4, hot, mask_of(set(range(VOCAB))), position),
        ]
        results = backend.execute(StepPlan(tuple(rows))).rows
        assert results[1].token_id in {3, 33, 39} and results[2].token_id == 17
        # A mask that allows everything changes nothing, and logprobs are those of the raw distribution.
        assert results[0] == results[4]
        assert results[2].logprobs is not None and results[3].logprobs is not None
        assert results[2].logprobs.top == results[3].logprobs.top


def test_empty_mask_fails_its_row_only(model: object) -> None:
    backend = backend_of(model, "auto")
    params = SamplingParams(temperature=1.0)
    none, some = backend.execute(StepPlan((row(0, params, mask_of(set())), row(1, params, mask_of({5}))))).rows
    assert none.error == "no token may be drawn: all are excluded" and some.token_id == 5


def test_masks_are_checked(model: object) -> None:
    backend = backend_of(model, "auto")
    arrays = list(flatten(StepPlan((row(0, SamplingParams(), mask_of({5})),))))
    *others, mask_rows, masks = arrays
    for bad in (
        [*others, mask_rows],
        [*others, np.array([1], np.int32), masks],
        [*others, np.array([-2], np.int32), masks],
        [*others, np.array([0, 0], np.int32), masks],
        [*others, mask_rows, masks[:, :1].copy()],
    ):
        with pytest.raises(ValueError, match="mask"):
            backend._program.execute(VOCAB, *bad)
