"""What a client asks for (Request, SamplingParams) and the lines of tokens it becomes (Sequence)."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from octavo.constraint import Constraint, Grammar, StructuredOutputsParams
from octavo.errors import RequestError

MAX_SAMPLES = 128
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are those of the OpenAI API, plus ABORT and ERROR."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Pooling(enum.StrEnum):
    """How the final hidden states of a prompt's tokens become its embedding."""

    LAST = "last"  # that of the last token
    MEAN = "mean"  # their mean


def _check(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise RequestError(f"{param} {message}", param=param, code="invalid_value")


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a sequence ends. Names and meanings are vLLM's.

    temperature 0 is greedy (ties: lowest id). `top_k` 0 or -1, `top_p` 1, `min_p` 0 are off;
    `top_p` 0 keeps only the most probable token. `seed` None draws a seed for the request.
    `max_tokens` None means all the room that the context leaves; larger values are clamped to it.
    presence and frequency penalties count generated tokens, the repetition penalty counts prompt
    and generated tokens (as transformers does). `logprobs` k asks for the k most probable tokens
    beside the chosen one, from the distribution before penalties and temperature. `best_of` draws that
    many samples and keeps the n with the highest mean log-probability per token. `use_beam_search` searches
    with best_of (or n) beams and returns the n best results; see `octavo.beams` for `length_penalty` and
    `early_stopping`, which mean what they do in transformers. The end that
    `structured_outputs` sets wins over `min_tokens` and `ignore_eos`. With `pooling` no token is drawn:
    the result is the embedding of the prompt.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        # Users of vLLM write stop="x" and lists; normalise once so that everyone else sees tuples.
        stop: object = self.stop
        if stop is None:
            object.__setattr__(self, "stop", ())
        elif isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check_limits()
        self._check_numbers()
        self._check_beam_search()

    def _check_limits(self) -> None:
        _check(_is_int(self.n) and 1 <= self.n <= MAX_SAMPLES, "n", f"must be an integer from 1 to {MAX_SAMPLES}")
        _check(
            self.best_of is None or (_is_int(self.best_of) and self.n <= self.best_of <= MAX_SAMPLES),
            "best_of",
            f"must be an integer from n to {MAX_SAMPLES}",
        )
        _check(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 0),
            "max_tokens",
            "must be an integer of at least 0",
        )
        _check(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "must be an integer of at least 0")
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings")
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", "must hold non-empty strings")
        _check(
            len(self.stop_token_ids) <= 1024 and all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            "must be a list of at most 1024 token ids",
        )
        _check(
            self.pooling is None or (self.max_tokens == 0 and self.num_sequences == 1 and self.prompt_logprobs is None),
            "pooling",
            "goes with max_tokens 0, one sample and no prompt_logprobs",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(
                value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS),
                name,
                f"must be an integer from 0 to {MAX_LOGPROBS}",
            )
        _check(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed <= MAX_SEED),
            "seed",
            "must be a 64-bit integer",
        )
        _check(len(self.logit_bias) <= 1024, "logit_bias", "takes at most 1024 tokens")
        for token_id, bias in self.logit_bias.items():
            _check(_is_int(token_id) and token_id >= 0, "logit_bias", "must map token ids to numbers")
            _check(_is_number(bias) and -100 <= bias <= 100, "logit_bias", "values must lie between -100 and 100")

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            _check(_is_number(value) and low <= value <= high, name, f"must be a number from {low:g} to {high:g}")
        _check(
            _is_number(self.repetition_penalty) and 0 < self.repetition_penalty <= 100,
            "repetition_penalty",
            "must be a number above 0 and at most 100",
        )
        _check(_is_int(self.top_k) and self.top_k >= -1, "top_k", "must be an integer of at least -1 (0 and -1: off)")

    def _check_beam_search(self) -> None:
        """A search ranks raw log-probabilities: what would change them, or draw, has no meaning in it."""
        penalty = self.length_penalty
        _check(
            _is_number(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY,
            "length_penalty",
            f"must be a number from -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}",
        )
        _check(
            isinstance(self.early_stopping, bool) or self.early_stopping == "never",
            "early_stopping",
            'must be true, false or "never"',
        )
        _check(isinstance(self.use_beam_search, bool), "use_beam_search", "must be true or false")
        if not self.use_beam_search:
            _check(penalty == 1.0, "length_penalty", "needs use_beam_search")
            _check(self.early_stopping is False, "early_stopping", "needs use_beam_search")
            return
        name = "n" if self.best_of is None else "best_of"
        _check(self.num_sequences <= MAX_BEAM_WIDTH, name, f"must be at most {MAX_BEAM_WIDTH} with use_beam_search")
        _check(self.temperature in (0.0, 1.0), "temperature", "must be 0 or 1 with use_beam_search")
        for param, neutral in (
            ("top_p", self.top_p == 1.0),
            ("top_k", self.top_k in (0, -1)),
            ("min_p", self.min_p == 0.0),
            ("presence_penalty", self.presence_penalty == 0.0),
            ("frequency_penalty", self.frequency_penalty == 0.0),
            ("repetition_penalty", self.repetition_penalty == 1.0),
            ("logit_bias", not self.logit_bias),
            ("stop", not self.stop),
            ("structured_outputs", self.structured_outputs is None),
        ):
            _check(neutral, param, "cannot be combined with use_beam_search")
        _check(self.max_tokens != 0, "max_tokens", "must be at least 1 with use_beam_search")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for one prompt."""
        return self.best_of or self.n

    @property
    def num_outputs(self) -> int:
        """Sequences that the engine tells about: of a beam search only the results."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens a backend returns beside the drawn one; None: no logprobs.

        Ranking needs the drawn tokens' logprobs even if the client does not.
        """
        if self.logprobs is None and self.num_outputs > self.n:
            return 0
        return self.logprobs

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(slots=True, kw_only=True)
class Request:
    """One request: prompt tokens and how to continue them.

    `request_id` is the engine's own and unique among live requests. `max_tokens` has already been
    clamped to the context by whoever built the request (see `octavo.engine.Engine.make_request`).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    tenant: str = ""  # whose request it is, for explanations and quotas; the cache goes by the salt alone
    priority: int = 0
    pin_seconds: float | None = None  # keep the prompt's full blocks cached for so long
    arrival: float = 0.0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError("the prompt holds no tokens", param="prompt", code="empty_prompt")
        assert self.max_tokens >= 0

    @property
    def end_ids(self) -> frozenset[int]:
        """All tokens that end a sequence."""
        stops = frozenset(self.params.stop_token_ids)
        return stops if self.params.ignore_eos else stops | self.eos_token_ids


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One line of tokens; a request with n samples has n of them.

    Positions of `token_ids`, left to right::

        0 ........ num_prompt ........ num_known
        |--- prompt ---|--- generated ---|
        |---- computed (KV written) ----|      num_computed <= num_known

    The scheduler gives a sequence tokens so that `num_computed` catches up with `num_known`; when it
    does, the step samples one more token. `block_ids[i]` holds positions [i*block_size, (i+1)*block_size).
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "constraint",
        "finish_reason",
        "index",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_registered",
        "num_shared",
        "order",
        "pooled",
        "prompt_logprobs_done",
        "request",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, request: Request, index: int = 0) -> None:
        self.request = request
        self.index = index
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []  # chained hashes of the full blocks known so far
        self.num_registered = 0  # leading blocks already findable in the prefix cache
        self.num_cached: int | None = None  # hit tokens at first admission; None until admitted
        self.num_shared = 0  # tokens whose KV it took from a sibling when it started
        self.num_preemptions = 0
        self.prompt_logprobs_done = 0  # prompt positions whose logprobs were already emitted
        self.pooled = b""  # what pooling has made of the computed tokens so far; the backend's own business
        self.order: tuple[float, int, int] = (0.0, 0, index)  # place in line, set by the scheduler
        # Follows the generated tokens, not the steps: what is computed again changes nothing here.
        self.constraint: Constraint | None = request.grammar.start() if request.grammar is not None else None
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Prompt logprobs are the same for all samples, so only the first one reports them."""
        return (
            self.request.params.prompt_logprobs is not None
            and self.index == 0
            and self.prompt_logprobs_done < self.num_prompt - 1
        )

    @property
    def needs_every_token(self) -> bool:
        """Is something asked of each prompt token that only the model can give, and no cached KV?"""
        return self.owes_prompt_logprobs or self.request.params.pooling is Pooling.MEAN

    @property
    def hit_limit(self) -> int:
        """Leading tokens that may be hits. Never the last known one: the next is drawn from its logits."""
        if not self.needs_every_token:
            return self.num_known - 1
        return min(self.num_known - 1, self.prompt_logprobs_done) if self.owes_prompt_logprobs else 0

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}/{self.index}, computed {self.num_computed} of {self.num_known}, "
            f"{len(self.block_ids)} blocks, {self.status.value})"
        )
