"""Which requests an engine may have died of, and in which order the next engine gets them again.

After a first death all requests in flight are sent again at once: most deaths are nobody's fault. A request that
sees a second one is a suspect. Suspects run in halves, and half of those, until an engine dies with one alone. If the
next one does so too, that is the culprit, and the others finish as if nothing had happened.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from octavo.server.journal import Submission, fingerprint_of
from octavo.server.wire import SubmitSpec

MAX_QUARANTINED = 1024


class Suspects:
    """The line of groups that still have to be sent. A group waits until the one before it is cleared."""

    def __init__(self) -> None:
        self._line: list[list[Submission]] = []
        self._fresh: list[Submission] = []  # came while others wait; last in line
        self._tested: list[Submission] = []
        self._quarantine: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Sequences that wait here and are unknown to any engine."""
        return sum(s.num_sequences for s in self._fresh)

    @property
    def isolating(self) -> bool:
        """Must whoever comes now wait?"""
        return bool(self._line or self._fresh) or any(s.num_deaths > 1 and not s.cleared for s in self._tested)

    def hold(self, submission: Submission) -> None:
        self._fresh.append(submission)

    def engine_ended(self, had: Sequence[Submission]) -> Submission | None:
        """Plans what comes next for those that the engine `had`; returns the culprit if there is one."""
        tested = [s for s in self._tested if s in had and not s.cleared]
        self._tested = []
        for submission in had:
            submission.engine_ended()
        if len(had) == 1:
            had[0].num_deaths_alone += 1
        if len(had) == 1 and had[0].num_deaths_alone > 1:
            self._quarantine[fingerprint_of(had[0].specs)] = None
            if len(self._quarantine) > MAX_QUARANTINED:
                self._quarantine.popitem(last=False)
            return had[0]
        if all(s.num_deaths == 1 for s in had):
            self._line.insert(0, list(had))
            return None
        tested = tested or [s for s in had if s.num_deaths > 1]
        others = [s for s in had if s not in tested]
        half = (len(tested) + 1) // 2
        self._line[:0] = [group for group in (tested[:half], tested[half:], others) if group]
        return None

    def next_group(self) -> list[Submission]:
        """Whom to send now; empty while others have to be waited for, and when nobody waits."""
        if any(s.num_deaths > 1 and not s.cleared for s in self._tested):
            return []
        while self._line or self._fresh:
            if not self._line:
                self._line, self._fresh = [self._fresh], []
            group = [s for s in self._line.pop(0) if s.entries and not s.handle.closed]
            if group:
                self._tested = group
                return group
        self._tested = []
        return []

    def quarantined(self, specs: Sequence[SubmitSpec]) -> bool:
        return bool(self._quarantine) and fingerprint_of(specs) in self._quarantine
