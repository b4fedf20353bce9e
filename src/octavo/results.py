"""What LLM.generate and LLM.chat return; names and shapes are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, its rank (1: most probable) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOfPosition = dict[int, Logprob]
"""Token id -> Logprob: the token at the position first, then the most probable ones, best first."""


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request. `cumulative_logprob` and `logprobs` are None unless logprobs were asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsOfPosition] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """What became of one prompt. `prompt_logprobs[0]` is None: nothing comes before the first token.

    `num_shared_tokens` (not in vLLM): prompt tokens that samples did not compute because a sibling had.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[LogprobsOfPosition | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    num_shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One vector, one number per hidden dimension."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What LLM.embed makes of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int = 0


def logprobs_of(entry: TokenLogprobs, decoded: dict[int, str]) -> LogprobsOfPosition:
    """The engine's TokenLogprobs in vLLM's shape; `decoded` gives the text of each token in it."""
    result = {entry.token_id: Logprob(entry.logprob, entry.rank, decoded.get(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        result.setdefault(token_id, Logprob(logprob, rank, decoded.get(token_id)))
    return result
