"""Holds each key to its limits, and counts what it uses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from starlette.types import Scope

from octavo.errors import QueueFullError
from octavo.server.keys import Key, KeyRing
from octavo.server.ledger import Ledger, Usage


class KeyLimitError(QueueFullError):
    """A key has reached one of its limits; `retry_after` is in seconds."""

    def __init__(self, message: str, code: str, retry_after: int) -> None:
        super().__init__(0, retry_after)
        self.message = message
        self.args = (message,)
        self.code = code


@dataclass(slots=True)
class Spent:
    """The tokens of one HTTP request, filled in while it is answered."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0


def spend(scope: Scope, num_prompt_tokens: int, num_generated_tokens: int) -> None:
    """Put tokens on the bill of whoever sent this request."""
    spent = scope.get("state", {}).get("spent")
    if spent is not None:
        spent.num_prompt_tokens += num_prompt_tokens
        spent.num_generated_tokens += num_generated_tokens


class Account:
    """One key: what it is doing now, and what it has used."""

    def __init__(self, key: Key, ledger: Ledger, now: Callable[[], float]) -> None:
        self.key = key
        self.num_active = 0
        self._ledger = ledger
        self._now = now
        # A bucket that holds one minute's requests and fills up evenly.
        self._allowance = float(key.limits.requests_per_minute or 0)
        self._filled_at = now()

    def change(self, key: Key) -> None:
        """Another key or other limits under the same name."""
        if key.limits.requests_per_minute != self.key.limits.requests_per_minute:
            self._allowance, self._filled_at = float(key.limits.requests_per_minute or 0), self._now()
        self.key = key

    def enter(self) -> Spent:
        """A request begins; `leave` must follow. Raises KeyLimitError, and then the request counts nowhere."""
        limits, name = self.key.limits, self.key.name
        if limits.max_concurrency is not None and self.num_active >= limits.max_concurrency:
            raise KeyLimitError(
                f"this key has {self.num_active} requests running, which is its limit", "concurrency_limit_exceeded", 1
            )
        if limits.tokens_total is not None and self._ledger.total(name).num_tokens >= limits.tokens_total:
            raise KeyLimitError(
                f"this key has used its {limits.tokens_total} tokens", "insufficient_quota",
                self._ledger.seconds_to_midnight(),
            )  # fmt: skip
        if limits.tokens_per_day is not None and self._ledger.today(name).num_tokens >= limits.tokens_per_day:
            raise KeyLimitError(
                f"this key has used its {limits.tokens_per_day} tokens of today (UTC)", "insufficient_quota",
                self._ledger.seconds_to_midnight(),
            )  # fmt: skip
        if limits.requests_per_minute is not None:
            self._take_allowance(limits.requests_per_minute)
        self.num_active += 1
        return Spent()

    def _take_allowance(self, per_minute: int) -> None:
        now = self._now()
        gained = (now - self._filled_at) * per_minute / 60
        self._allowance = min(float(per_minute), self._allowance + gained)
        self._filled_at = now
        if self._allowance < 1:
            seconds = math.ceil((1 - self._allowance) * 60 / per_minute) if per_minute else 3600
            raise KeyLimitError(
                f"this key may send {per_minute} requests a minute", "rate_limit_exceeded", max(1, seconds)
            )
        self._allowance -= 1

    def leave(self, spent: Spent) -> None:
        self.num_active -= 1
        self._ledger.add(self.key.name, 1, spent.num_prompt_tokens, spent.num_generated_tokens)

    def describe(self) -> dict[str, Any]:
        """The answer of GET /v1/usage."""
        name = self.key.name
        return {
            "object": "usage",
            "key": name,
            "active_requests": self.num_active,
            "today": _numbers(self._ledger.today(name)),
            "total": _numbers(self._ledger.total(name)),
            "limits": asdict(self.key.limits),
        }


def _numbers(usage: Usage) -> dict[str, int]:
    return {
        "requests": usage.num_requests,
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_generated_tokens,
    }


class Accounts:
    """All keys' accounts."""

    def __init__(self, ring: KeyRing, ledger: Ledger, *, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: seconds of any clock that never goes back."""
        self._ledger = ledger
        self._now = now
        self._by_name: dict[str, Account] = {}
        self.use(ring)

    def use(self, ring: KeyRing) -> None:
        """From now on these are the keys. Who keeps the name keeps what is running and used; requests go on."""
        known = self._by_name
        self._by_name = {key.name: known.get(key.name) or Account(key, self._ledger, self._now) for key in ring.keys}
        for key in ring.keys:
            self._by_name[key.name].change(key)
        self._ring = ring

    def find(self, presented: bytes) -> Account | None:
        key = self._ring.find(presented)
        return None if key is None else self._by_name[key.name]

    def all(self) -> list[tuple[str, Usage]]:
        """What each key has used in all, by name."""
        return [(name, self._ledger.total(name)) for name in self._by_name]

    def close(self) -> None:
        self._ledger.close()
