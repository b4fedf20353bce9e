"""The reference sampler: one row of logits to one token, in numpy, written to be read.

It defines what every native sampler must do, and tests hold them to it. The steps, in order:

1. repetition penalty on every distinct token of prompt and output (transformers' definition), then frequency
   and presence penalty on output tokens (OpenAI's), then `logit_bias`, then bans: all in float32;
2. temperature 0: the largest logit, ties to the lowest id. Else weights w = exp((x - max) / temperature);
3. top_k: the k largest logits (of equals at the border, those with the lowest ids);
   top_p: of what top_k left, the fewest most probable tokens that hold at least the share top_p of its weight;
   min_p: of what is left, those with at least min_p of the best token's weight;
4. the first token, in order of ids, at which the running sum of weights exceeds u times their total, where u
   depends on (seed, sample index, position) alone.

Log-probabilities are those of the given row, before all of this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from octavo.plan import RowResult, SampleSpec, TokenLogprobs
from octavo.request import SamplingParams

Floats = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Words = tuple[int, int, int, int]

_MASK32 = 0xFFFFFFFF
_FLOOR = -87.33  # exponents below it weigh nothing: float32 has no normal numbers there


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10: four random 32-bit words from a counter of four and a key of two.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = 0xD2511F53 * c0
        product1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0 = (k0 + 0x9E3779B9) & _MASK32
        k1 = (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, sample_index: int, position: int) -> float:
    """The draw in [0, 1) of one token, with 53 random bits. A negative seed counts modulo 2**64."""
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    w0, w1, _, _ = philox4x32((sample_index, position, 0, 0), key)
    return float((w1 << 32 | w0) >> 11) * 2.0**-53


def adjusted_logits(
    logits: Floats,
    params: SamplingParams,
    prompt_ids: Iterable[int] = (),
    output_ids: Iterable[int] = (),
    banned_ids: Iterable[int] = (),
    allowed: npt.NDArray[np.bool_] | None = None,
) -> Floats:
    """Logits [vocab] after penalties, bias, bans and the mask `allowed` [vocab], in float32.

    Ids outside the vocabulary are passed over.
    """
    x = np.array(logits, np.float32)
    counts = Counter(t for t in output_ids if 0 <= t < len(x))
    seen = set(counts)
    repetition = np.float32(params.repetition_penalty)
    if repetition != 1:
        seen |= {t for t in prompt_ids if 0 <= t < len(x)}
    for t in seen:
        if repetition != 1:
            x[t] = x[t] / repetition if x[t] > 0 else x[t] * repetition
        x[t] -= np.float32(params.frequency_penalty) * np.float32(counts[t])
        if counts[t] > 0:
            x[t] -= np.float32(params.presence_penalty)
    _add_bias(x, params.logit_bias)
    for t in banned_ids:
        if 0 <= t < len(x):
            x[t] = -np.inf
    if allowed is not None:
        x[~allowed] = -np.inf
    return x


def _add_bias(x: Floats, bias: Mapping[int, float]) -> None:
    for t, value in bias.items():
        if t < len(x):
            x[t] += np.float32(value)


def order(logits: Floats) -> npt.NDArray[np.int64]:
    """Token ids from the most to the least probable; of equal logits the lowest id first."""
    return np.argsort(-(logits + np.float32(0)), kind="stable")


def filtered_weights(logits: Floats, params: SamplingParams) -> Weights:
    """Weights [vocab] of the tokens that temperature, top_k, top_p and min_p leave; 0 for the others.

    `logits` are adjusted, without NaN and +inf, and not all -inf; the temperature is above 0.
    """
    temperature = max(float(np.float32(params.temperature)), 1e-30)
    exponents = (logits.astype(np.float64) - float(logits.max())) / temperature
    weights = np.where(exponents < _FLOOR, 0.0, np.exp(np.maximum(exponents, _FLOOR)))
    best_first = order(logits)
    keep = len(logits)
    if 0 < params.top_k < len(logits):
        keep = params.top_k
    if params.top_p < 1:
        cumulative = np.cumsum(weights[best_first[:keep]])
        needed = float(np.float32(params.top_p)) * cumulative[-1]
        keep = min(keep, int(np.searchsorted(cumulative, needed)) + 1)
    weights[best_first[keep:]] = 0.0
    weights[weights < float(np.float32(params.min_p))] = 0.0
    return weights


def draw(weights: Weights, u: float) -> int:
    """The first id at which the running sum exceeds u times the total."""
    cumulative = np.cumsum(weights)
    token = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(token, int(np.flatnonzero(weights)[-1]))


def score(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of one token and the `num_top` most probable tokens, from the row as given."""
    x = logits.astype(np.float64)
    best = float(x.max())
    logprobs = x - best - math.log(float(np.exp(x - best).sum()))
    best_first = order(logits)
    rank = int(np.flatnonzero(best_first == token_id)[0]) + 1
    top = tuple((int(t), float(logprobs[t])) for t in best_first[:num_top])
    return TokenLogprobs(token_id, float(logprobs[token_id]), rank, top)


def _fault(logits: Floats) -> str | None:
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return "the logits hold NaN or +inf"
    if np.isneginf(logits).all():
        return "no token is allowed"
    return None


def sample(logits: Floats, spec: SampleSpec, allowed: npt.NDArray[np.bool_] | None = None) -> RowResult:
    """The next token of one sequence from its logits [vocab]; a bad row gives an `error`, not an exception."""
    fault = _fault(logits)
    if fault is not None:
        return RowResult(error=fault)
    params = spec.params
    prompt_ids, output_ids = spec.token_ids[: spec.num_prompt], spec.token_ids[spec.num_prompt :]
    x = adjusted_logits(logits, params, prompt_ids, output_ids, spec.banned_ids, allowed)
    fault = _fault(x)
    if fault is not None:
        return RowResult(error=fault)
    if params.greedy:
        token_id = int(np.argmax(x))
    else:
        token_id = draw(filtered_weights(x, params), uniform(spec.seed, spec.sample_index, spec.position))
    logprobs = None if spec.num_logprobs is None else score(logits, token_id, spec.num_logprobs)
    return RowResult(token_id=token_id, logprobs=logprobs)
