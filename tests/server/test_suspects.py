"""Which request killed the engine: found by halving, whoever else was there, without blaming anyone else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.events import OutputEvent
from octavo.request import FinishReason, SamplingParams
from octavo.server.client import RequestHandle
from octavo.server.journal import Entry, ReplayError, Submission, fingerprint_of
from octavo.server.suspects import Suspects
from octavo.server.wire import FinishSequence, Submit, SubmitSpec


def spec(name: str, n: int = 1, seed: int = 0) -> SubmitSpec:
    return SubmitSpec(request_id=name, prompt_token_ids=[1, 2], params=SamplingParams(n=n, seed=seed, max_tokens=9))


def submission(number: int) -> Submission:
    one = spec(f"r{number}")
    handle = RequestHandle([one.request_id], lambda handle: None)
    return Submission(number, [SubmitSpec(**{**_fields(one), "prompt_token_ids": [number + 1]})], handle)


def _fields(one: SubmitSpec) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


class World:
    """Engines that die as soon as they have a killer; others give one token per round, and end after three."""

    def __init__(self, num: int, killers: set[int]) -> None:
        self.suspects = Suspects()
        self.alive = {i: submission(i) for i in range(num)}
        self.killers = killers
        self.engine: list[Submission] = []
        self.convicted: list[int] = []
        self.num_deaths = 0
        for one in self.alive.values():
            self.suspects.hold(one)

    def run(self) -> None:
        for _ in range(10_000):
            while group := self.suspects.next_group():
                for one in group:
                    one.sent = True
                    for entry in one.entries.values():
                        entry.rewind()
                self.engine += group
            if not self.engine:
                return
            if any(one.ticket in self.killers for one in self.engine):
                self.die()
            else:
                self.step()
        raise AssertionError("it never ends")

    def die(self) -> None:
        self.num_deaths += 1
        had, self.engine = self.engine, []
        culprit = self.suspects.engine_ended(had)
        if culprit is not None:
            self.convicted.append(culprit.ticket)
            culprit.entries.clear()
            del self.alive[culprit.ticket]

    def step(self) -> None:
        for one in list(self.engine):
            entry = one.entries[f"r{one.ticket}"]
            position = entry._reached[0]
            last = FinishReason.LENGTH if position == 2 else None
            entry.take(OutputEvent(f"r{one.ticket}", 0, token_ids=(100 + position,), finish_reason=last))
            if entry.finished:
                one.entries.clear()
                self.engine.remove(one)
                del self.alive[one.ticket]


@settings(max_examples=150, deadline=None)
@given(num=st.integers(1, 70), data=st.data())
def test_exactly_the_killers_are_given_up(num: int, data: st.DataObject) -> None:
    killers = data.draw(st.sets(st.integers(0, num - 1), max_size=3))
    world = World(num, killers)
    world.run()
    assert set(world.convicted) == killers and not world.alive
    assert world.num_deaths <= len(killers) * (4 + math.ceil(math.log2(num)))


def test_quarantine_is_by_what_was_asked() -> None:
    world = World(3, {1})
    world.run()
    culprit, other = submission(1).specs, submission(2).specs
    assert world.suspects.quarantined(culprit) and not world.suspects.quarantined(other)
    assert fingerprint_of([spec("a", seed=1)]) == fingerprint_of([spec("b", seed=2)])
    assert fingerprint_of([spec("a", n=1)]) != fingerprint_of([spec("a", n=2)])


def test_clients_that_left_are_not_sent_again() -> None:
    world = World(4, set())
    world.engine = world.suspects.next_group()
    world.engine[1].handle.closed = True
    world.die()
    assert [one.ticket for one in world.suspects.next_group()] == [0, 2, 3]


# ---------------------------------------------------------------------------- the journal


def event(*token_ids: int, index: int = 0, end: FinishReason | None = None) -> OutputEvent:
    return OutputEvent("r", index, token_ids=token_ids, finish_reason=end)


def test_replay_leaves_out_what_is_known() -> None:
    entry = Entry(spec("r", n=2))
    assert entry.take(event(1)) == event(1) and entry.take(event(2)) == event(2)
    assert entry.take(event(7, index=1, end=FinishReason.STOP)) is not None
    entry.rewind()
    assert entry.take(event(1)) is None
    assert entry.take(event(2, 3)) == event(3)  # known and new in one event
    assert entry.take(event(7, index=1)) is None  # an ended sample is silent
    assert entry.take(event(4, end=FinishReason.LENGTH)) == event(4, end=FinishReason.LENGTH)
    assert entry.finished and entry.num_tokens == 5


@pytest.mark.parametrize("wrong", [event(9), event(1, end=FinishReason.STOP)])
def test_replay_that_differs_is_refused(wrong: OutputEvent) -> None:
    entry = Entry(spec("r"))
    entry.take(event(1))
    entry.take(event(2))
    entry.rewind()
    with pytest.raises(ReplayError):
        entry.take(wrong)


def test_ended_samples_are_told_to_the_next_engine() -> None:
    handle = RequestHandle(["r"], lambda handle: None)
    one = Submission(5, [spec("r", n=3)], handle)
    one.entries["r"].done[1] = True
    commands = one.commands()
    assert isinstance(commands[0], Submit) and commands[0].ticket == 5
    assert commands[1:] == [FinishSequence("r", 1)]
