"""Constraints in the core: masks follow the known tokens whatever happens, and the grammar's end wins."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from support.run import Driver, preempt_last
from support.script_backend import HashBackend, ScriptBackend

from octavo.constraint import StructuredOutputsParams
from octavo.errors import RequestError
from octavo.request import FinishReason, SamplingParams

VOCAB = 128
EOS = 7
WISH = StructuredOutputsParams(regex="x")


def mask_of(ids: set[int]) -> bytes:
    bits = sum(1 << i for i in ids)
    return bits.to_bytes(VOCAB // 8, "little")


@dataclass
class Walk:
    """The token after k accepted ones is one of ten that depend on k and on the last; ends after `length`."""

    length: int
    can_end_after: int
    accepted: list[int] = field(default_factory=list)

    def allowed(self) -> set[int]:
        start = 10 + (len(self.accepted) * 13 + sum(self.accepted[-1:])) % 100
        return set(range(start, start + 10)) | ({EOS} if len(self.accepted) >= self.can_end_after else set())

    def mask(self) -> bytes:
        return mask_of(self.allowed())

    def accept(self, token_id: int) -> bool:
        assert token_id in self.allowed(), "a token outside the mask"
        self.accepted.append(token_id)
        return token_id == EOS or len(self.accepted) == self.length


@dataclass
class WalkGrammar:
    length: int = 20
    can_end_after: int = 1000
    walks: list[Walk] = field(default_factory=list)

    def start(self) -> Walk:
        self.walks.append(Walk(self.length, self.can_end_after))
        return self.walks[-1]

    def compile(self, wish: StructuredOutputsParams) -> WalkGrammar:
        return self


def driver_of(grammar: WalkGrammar, backend: object = None, **config: object) -> Driver:
    driver = Driver(backend or HashBackend(vocab_size=VOCAB), **config)  # type: ignore[arg-type]
    driver.engine.grammars = grammar
    return driver


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"seed": 3, "max_tokens": 60, "structured_outputs": WISH, **changes})  # type: ignore[arg-type]


def test_complete_text_stops_without_eos() -> None:
    grammar = WalkGrammar(length=5)
    outcome = driver_of(grammar).ask(list(range(30)), params())
    assert outcome.finish_reason is FinishReason.STOP and outcome.stop_reason is None
    assert outcome.token_ids == grammar.walks[0].accepted and len(outcome.token_ids) == 5


@pytest.mark.parametrize("max_tokens", [4, 5, 6])
def test_end_of_the_grammar_wins_over_length(max_tokens: int) -> None:
    """C131: cut is `length`; complete with the last token that the limit allows is `stop`."""
    outcome = driver_of(WalkGrammar(length=5)).ask([1, 2, 3], params(max_tokens=max_tokens))
    assert outcome.finish_reason is (FinishReason.LENGTH if max_tokens < 5 else FinishReason.STOP)
    assert len(outcome.token_ids) == min(max_tokens, 5)


def test_end_of_the_grammar_wins_over_min_tokens_and_ignore_eos() -> None:
    """EOS is held back while the grammar can go on and the minimum is not reached; its end ends all."""
    backend = ScriptBackend(vocab_size=VOCAB, end_id=EOS)
    driver = driver_of(WalkGrammar(length=6, can_end_after=2), backend)
    outcome = driver.ask([1], params(min_tokens=50), eos_token_ids=frozenset({EOS}))
    assert len(outcome.token_ids) == 6 and EOS not in outcome.token_ids
    outcome = driver.ask([2], params(ignore_eos=True), eos_token_ids=frozenset({EOS}))
    assert outcome.token_ids[2:] == [EOS] and outcome.finish_reason is FinishReason.STOP
    # A stop token that the grammar needs is drawn before the minimum, and does not stop.
    start = driver.ask([3], params(), eos_token_ids=frozenset({EOS})).token_ids[0]
    outcome = driver.ask([3], params(min_tokens=50, stop_token_ids=(start,)), eos_token_ids=frozenset({EOS}))
    assert len(outcome.token_ids) == 6 and outcome.token_ids[0] == start
    outcome = driver.ask([3], params(stop_token_ids=(start,)), eos_token_ids=frozenset({EOS}))
    assert outcome.token_ids == [start] and outcome.stop_reason == start


def test_law_1_under_preemption_chunks_and_load() -> None:
    """Alone, among others, in small chunks and preempted again and again: the same tokens."""
    prompts = [[i * 7 % 100, *range(i, i + 5 * i)] for i in range(1, 9)]

    def run(*, together: bool, preempt: bool = False, **config: object) -> list[list[int]]:
        grammar = WalkGrammar(length=25)
        driver = driver_of(grammar, **config)
        ids = []
        for number, prompt in enumerate(prompts):
            ids.append(driver.add(prompt, params(n=2, seed=number)))
            if not together:
                driver.run()
        if preempt:
            while driver.engine.has_unfinished:
                driver.step()
                if driver.engine.scheduler.running and driver.num_steps % 3 == 0:
                    preempt_last(driver.engine)
        driver.run()
        # Each state was advanced once per token, however often its KV was computed.
        for walk in grammar.walks:
            assert len(walk.accepted) == 25
        return [driver.outcomes[i, sample].token_ids for i in ids for sample in range(2)]

    alone = run(together=False)
    assert alone == run(together=True)
    assert alone == run(together=True, max_num_batched_tokens=16)
    assert alone == run(together=True, preempt=True)
    assert alone == run(together=True, num_blocks=12)
    assert alone == run(together=True, enable_prefix_caching=False)


def test_empty_mask_ends_that_request_only() -> None:
    class Broken(Walk):
        def allowed(self) -> set[int]:
            return set() if len(self.accepted) == 2 else super().allowed()

    class BrokenGrammar(WalkGrammar):
        def start(self) -> Walk:
            return Broken(5, 5)

    driver = driver_of(BrokenGrammar())
    bad = driver.add([1, 2], params())
    good = driver.add([1, 2], SamplingParams(max_tokens=9, seed=1))
    driver.run()
    assert driver.outcomes[bad, 0].finish_reason is FinishReason.ERROR
    assert "no token may be drawn" in (driver.outcomes[bad, 0].error or "")
    assert len(driver.outcomes[good, 0].token_ids) == 9


def test_engine_without_grammars_refuses() -> None:
    with pytest.raises(RequestError, match="tokenizer") as e:
        Driver().add([1], params())
    assert e.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "exactly one"),
        ({"json_object": False}, "exactly one"),
        ({"choice": []}, "non-empty"),
        ({"choice": [""]}, "non-empty"),
        ({"choice": "ab"}, "non-empty"),
        ({"choice": ["x"] * 5000}, "at most"),
        ({"regex": 3}, "string"),
        ({"regex": "a" * 200_000}, "characters"),
        ({"regex": "\ud800"}, "Unicode"),
        ({"json": {"a": {1, 2}}}, "not a JSON schema"),
        ({"regex": "a", "disable_any_whitespace": 3}, "true or false"),
    ],
)
def test_bad_wishes(fields: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words) as e:
        StructuredOutputsParams(**fields)  # type: ignore[arg-type]
    assert e.value.param == "structured_outputs" and len(e.value.message) < 300


def test_wishes_are_values() -> None:
    schema = {"type": "object"}
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams(json='{"type": "object"}')
    assert hash(StructuredOutputsParams(choice=["a", "b"])) == hash(StructuredOutputsParams(choice=("a", "b")))  # type: ignore[arg-type]
