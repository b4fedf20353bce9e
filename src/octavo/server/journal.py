"""What the front end remembers of each request, so that another engine can finish it where the first one stopped.

Tokens depend on prompt, parameters and seed alone (law 1). So an unfinished request is simply sent again, with the
seed that was drawn for it: what the client has already got is compared and left out, the rest is passed on.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import msgspec

from octavo.events import OutputEvent
from octavo.server.client import RequestHandle
from octavo.server.wire import FinishSequence, GenerationError, Submit, SubmitSpec


class ReplayError(GenerationError):
    """The second engine said something else than the first one."""

    def __init__(self) -> None:
        super().__init__("the engine was restarted and could not continue this answer where it had stopped")


class Entry:
    """One request: what was asked for, and how much of the answer has been passed on."""

    def __init__(self, spec: SubmitSpec) -> None:
        self.spec = spec
        n = spec.params.num_outputs
        self.token_ids: list[list[int]] = [[] for _ in range(n)]
        self.done = [False] * n
        self._num_prompt_logprobs = 0
        # How far the present engine has come, in tokens per sample and in prompt logprobs.
        self._reached = [0] * n
        self._prompt_reached = 0

    def rewind(self) -> None:
        """The next engine begins at the beginning."""
        self._reached = [0] * len(self.done)
        self._prompt_reached = 0

    @property
    def finished(self) -> bool:
        return all(self.done)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def take(self, event: OutputEvent) -> OutputEvent | None:
        """What of an event is news; None if nothing. Raises ReplayError if it contradicts what was passed on."""
        i = event.index
        if self.done[i]:
            return None
        known, reached, num = self.token_ids[i], self._reached[i], len(event.token_ids)
        old = known[reached : reached + num]
        self._reached[i] = reached + num
        if old and tuple(old) != event.token_ids[: len(old)]:
            raise ReplayError
        known.extend(event.token_ids[len(old) :])
        if event.finish_reason is not None:
            if event.error is None and self._reached[i] < len(known):
                raise ReplayError
            self.done[i] = True
        num_scores = len(event.prompt_logprobs)
        old_scores = min(num_scores, self._num_prompt_logprobs - self._prompt_reached)
        self._prompt_reached += num_scores
        self._num_prompt_logprobs = max(self._num_prompt_logprobs, self._prompt_reached)
        if not old and not old_scores:
            return event
        if len(old) == num and old_scores == num_scores and event.finish_reason is None:
            return None
        return dataclasses.replace(
            event,
            token_ids=event.token_ids[len(old) :],
            logprobs=None if event.logprobs is None else event.logprobs[len(old) :],
            prompt_logprobs=event.prompt_logprobs[old_scores:],
        )


class Submission:
    """One HTTP request on its way: its prompts are admitted together, and suspected together."""

    def __init__(self, ticket: int, specs: Sequence[SubmitSpec], handle: RequestHandle) -> None:
        self.ticket = ticket
        self.handle = handle
        self.specs = tuple(specs)
        self.entries = {spec.request_id: Entry(spec) for spec in specs}
        self.sent = False  # to the present engine
        self.admitted = False  # by any engine
        self.num_deaths = 0  # engines that ended while they had it
        self.num_deaths_alone = 0  # of these, while they had nothing else
        self._num_tokens_at_death = 0

    @property
    def num_sequences(self) -> int:
        return sum(len(entry.done) for entry in self.entries.values())

    def commands(self) -> list[Submit | FinishSequence]:
        """What tells an engine of everything that is unfinished."""
        self.sent = True
        for entry in self.entries.values():
            entry.rewind()
        made: list[Submit | FinishSequence] = [Submit(self.ticket, [e.spec for e in self.entries.values()])]
        for request_id, entry in self.entries.items():
            made += [FinishSequence(request_id, index) for index, done in enumerate(entry.done) if done]
        return made

    def engine_ended(self) -> None:
        self.sent = False
        self.num_deaths += 1
        self._num_tokens_at_death = self._num_tokens

    @property
    def _num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries.values())

    @property
    def cleared(self) -> bool:
        """It is over, or has come further than when the last engine ended (if that happened only a few times)."""
        if not self.entries or self.handle.closed:
            return True
        return self.num_deaths < 4 and self._num_tokens > self._num_tokens_at_death


def fingerprint_of(specs: Sequence[SubmitSpec]) -> bytes:
    """Equal for requests that ask for the same, whatever their ids and seeds."""
    asked = [
        msgspec.structs.replace(spec, request_id="", params=dataclasses.replace(spec.params, seed=None))
        for spec in specs
    ]
    return hashlib.sha256(msgspec.msgpack.encode(asked)).digest()
