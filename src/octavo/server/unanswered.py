"""What an engine has been asked and has not answered, and for how long it owes that."""

from __future__ import annotations

import time
from collections.abc import Callable


class Unanswered:
    """Tickets by the time they were sent. All times in seconds of `now`.

    Those that wait for a grammar are deferred: they stand in line for one compiler, so what counts is how long no
    answer to any of them has come.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._asked: dict[int, float] = {}
        self._deferred: set[int] = set()
        self._deferred_since = 0.0

    def ask(self, ticket: int) -> None:
        self._asked[ticket] = self._now()

    def defer(self, ticket: int) -> None:
        if self._asked.pop(ticket, None) is not None:
            if not self._deferred:
                self._deferred_since = self._now()
            self._deferred.add(ticket)

    def answer(self, ticket: int) -> None:
        self._asked.pop(ticket, None)
        if ticket in self._deferred:
            self._deferred.remove(ticket)
            self._deferred_since = self._now()

    def clear(self) -> None:
        self._asked.clear()
        self._deferred.clear()

    def seconds(self) -> float:
        """How long the longest has been owed; 0.0 where nothing is."""
        now = self._now()
        since = min(self._asked.values(), default=now)
        return now - min(since, self._deferred_since if self._deferred else now)
