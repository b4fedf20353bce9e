"""What a load test sends and when: prompt and output lengths, prompts, arrival times. All fixed by one seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from octavo.errors import ConfigError

FIRST_TOKEN_ID = 64
"""Ids below are often special tokens or single bytes; random prompts leave them out where the vocabulary allows."""

# A log-normal mix with the means that the vLLM paper (SOSP 2023, figure 11) gives for ShareGPT conversations:
# 161 prompt and 338 output tokens. mean = median * exp(sigma^2 / 2), before clipping.
SHAREGPT_INPUT = (80.0, 1.18)
SHAREGPT_OUTPUT = (205.0, 1.0)
SHORTEST = 4

# Each is about one token of every common vocabulary, with the space before it.
_WORDS = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no she other its may these what "
    "than then some him out up time my about into could them people only new two very our over like work life world "
    "house water small great place where long little found still between name good year come part"
)
WORDS = _WORDS.split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts and outputs are. `kind` "fixed": exactly input_len and output_len; "sharegpt": drawn from
    the log-normal mix above, cut off at input_len and output_len."""

    kind: str
    input_len: int
    output_len: int

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of one prompt and of its output."""
        if self.kind == "fixed":
            return self.input_len, self.output_len
        return _log_normal(rng, *SHAREGPT_INPUT, self.input_len), _log_normal(rng, *SHAREGPT_OUTPUT, self.output_len)


def _log_normal(rng: random.Random, median: float, sigma: float, longest: int) -> int:
    return max(min(SHORTEST, longest), min(longest, round(rng.lognormvariate(math.log(median), sigma))))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to come: `num_input` prompt tokens asked for, and what to send for them."""

    num_input: int
    num_output: int
    token_ids: list[int]
    text: str


def make_prompts(num_prompts: int, lengths: Lengths, vocab_size: int, seed: int) -> list[Prompt]:
    """Random prompts as token ids and as text. As text, one word stands for a token: the server's count decides."""
    if vocab_size < 2:
        raise ConfigError("vocab-size must be at least 2")
    rng = random.Random(seed)
    first = FIRST_TOKEN_ID if vocab_size > 2 * FIRST_TOKEN_ID else 0
    prompts = []
    for _ in range(num_prompts):
        num_input, num_output = lengths.draw(rng)
        ids = [rng.randrange(first, vocab_size) for _ in range(num_input)]
        prompts.append(Prompt(num_input, num_output, ids, " ".join(WORDS[i % len(WORDS)] for i in ids)))
    return prompts


def arrival_times(num_prompts: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are due: a Poisson process of `rate` a second; all 0 if infinite."""
    if math.isinf(rate):
        return [0.0] * num_prompts
    rng = random.Random(seed ^ 0x5EED)
    times, now = [], 0.0
    for _ in range(num_prompts):
        times.append(now)
        now += rng.expovariate(rate)
    return times
