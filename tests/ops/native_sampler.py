"""Calls the native samplers through the extension module, in the words of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo import _native
from octavo.plan import SampleSpec
from octavo.request import SamplingParams

OK, BAD_ROW, NOTHING_ALLOWED = 0, 1, 2


@dataclass(frozen=True)
class NativeOut:
    token_id: int
    status: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def isas() -> list[str]:
    return list(_native.sampler_isas())


def spec(
    params: SamplingParams,
    *,
    seed: int = 0,
    sample_index: int = 0,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    banned: Sequence[int] = (),
) -> SampleSpec:
    return SampleSpec(params, seed, sample_index, position, [*prompt, *output], len(prompt), tuple(banned))


def native_params(s: SampleSpec, allowed: np.ndarray | None = None) -> dict[str, Any]:
    p = s.params
    row: dict[str, Any] = {
        "temperature": p.temperature,
        "top_p": p.top_p,
        "min_p": p.min_p,
        "presence_penalty": p.presence_penalty,
        "frequency_penalty": p.frequency_penalty,
        "repetition_penalty": p.repetition_penalty,
        "top_k": p.top_k,
        "seed": s.seed % 2**64,
        "sample_index": s.sample_index,
        "position": s.position,
        "prompt_ids": s.token_ids[: s.num_prompt],
        "output_ids": s.token_ids[s.num_prompt :],
        "banned_ids": list(s.banned_ids),
        "bias_ids": list(p.logit_bias),
        "bias_values": [float(v) for v in p.logit_bias.values()],
        "num_logprobs": -1 if p.logprobs is None else p.logprobs,
    }
    if allowed is not None:
        padded = np.zeros((len(allowed) + 31) // 32 * 32, np.uint8)
        padded[: len(allowed)] = allowed
        row["mask"] = np.packbits(padded, bitorder="little").view("<u4").tolist()
    return row


def run(isa: str, logits: np.ndarray, rows: list[dict[str, Any]]) -> list[NativeOut]:
    """Rows of float32 logits [rows, vocab] and one dict of `SampleRow` fields for each."""
    results = _native.sample(isa, np.ascontiguousarray(logits, np.float32), rows)
    return [
        NativeOut(token, status, logprob, rank, tuple(zip(ids, logprobs, strict=True)))
        for token, status, logprob, rank, ids, logprobs in results
    ]


def run_one(isa: str, logits: np.ndarray, s: SampleSpec, allowed: np.ndarray | None = None) -> NativeOut:
    return run(isa, np.asarray(logits, np.float32)[None], [native_params(s, allowed)])[0]


def score_one(isa: str, logits: np.ndarray, target: int, num_top: int) -> NativeOut:
    row = {"sample": False, "target": target, "num_logprobs": num_top}
    return run(isa, np.asarray(logits, np.float32)[None], [row])[0]
