"""What LLM.generate and LLM.chat return; names and shapes are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo.plan import TokenLogprobs
from octavo.request import SamplingParams


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
    """One sequence of a request. `cumulative_logprob` and `logprobs` are None unless logprobs were asked for.

    `score` (not in vLLM) is that of a beam search: the sum of the log-probabilities over length ** length_penalty.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsOfPosition] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search: what LLM.beam_search takes, as in vLLM, with `early_stopping` in addition.

    `temperature` must be 0 or 1: a search ranks the model's own log-probabilities.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """The same for LLM.generate. RequestError if a value is out of range."""
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One result: `tokens` and `text` with the prompt in front (as in vLLM), `score` what it was ranked by."""

    tokens: list[int]
    logprobs: list[LogprobsOfPosition]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None
    score: float | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The results of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(result: RequestOutput) -> BeamSearchOutput:
    """A finished RequestOutput of a search in the shape of LLM.beam_search."""
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=[*result.prompt_token_ids, *output.token_ids],
                logprobs=output.logprobs or [],
                cum_logprob=output.cumulative_logprob or 0.0,
                text=None if result.prompt is None else result.prompt + output.text,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                score=output.score,
            )
            for output in result.outputs
        ]
    )


def logprobs_of(entry: TokenLogprobs, decoded: dict[int, str]) -> LogprobsOfPosition:
    """The engine's TokenLogprobs in vLLM's shape; `decoded` gives the text of each token in it."""
    result = {entry.token_id: Logprob(entry.logprob, entry.rank, decoded.get(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        result.setdefault(token_id, Logprob(logprob, rank, decoded.get(token_id)))
    return result
