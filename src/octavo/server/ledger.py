"""What each key has used, by day, in a SQLite file that outlives the server."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError
from octavo.units import shorten

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0

_CREATE = (
    "CREATE TABLE IF NOT EXISTS usage (name TEXT NOT NULL, day TEXT NOT NULL, num_requests INTEGER NOT NULL,"
    " num_prompt_tokens INTEGER NOT NULL, num_generated_tokens INTEGER NOT NULL, PRIMARY KEY (name, day))"
)
# Sums are added, not set, so that a second server on the same file loses nothing.
_ADD = (
    "INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT (name, day) DO UPDATE SET"
    " num_requests = num_requests + excluded.num_requests,"
    " num_prompt_tokens = num_prompt_tokens + excluded.num_prompt_tokens,"
    " num_generated_tokens = num_generated_tokens + excluded.num_generated_tokens"
)


@dataclass(slots=True)
class Usage:
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_generated_tokens

    def add(self, num_requests: int, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_prompt_tokens += num_prompt_tokens
        self.num_generated_tokens += num_generated_tokens


class Ledger:
    """Counts in memory and writes what is new once a second from a thread; a crash loses at most that second."""

    def __init__(self, path: str | Path | None, *, now: Callable[[], float] = time.time) -> None:
        """`path` None: in memory only. `now`: seconds since 1970. Raises ConfigError if the file is no use."""
        self._now = now
        self._lock = threading.Lock()
        self._totals: dict[str, Usage] = {}
        self._today: dict[str, Usage] = {}
        self._day = self.day()
        self._pending: dict[tuple[str, str], Usage] = {}
        self._stop = threading.Event()
        self._warned = False
        self._database: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        if path is not None:
            try:
                self._database = sqlite3.connect(Path(path).expanduser(), timeout=5, check_same_thread=False)
                with self._database as db:
                    db.execute(_CREATE)
                    db.execute(_ADD, ("", self._day, 0, 0, 0))  # can it be written?
                self._load(self._database)
            except sqlite3.Error as e:
                raise ConfigError(f"usage_db: cannot use {shorten(str(path))}: {e}") from None
            self._thread = threading.Thread(target=self._write_on, name="octavo-ledger", daemon=True)
            self._thread.start()

    def _load(self, database: sqlite3.Connection) -> None:
        for name, day, *numbers in database.execute("SELECT * FROM usage"):
            self._totals.setdefault(name, Usage()).add(*numbers)
            if day == self._day:
                self._today.setdefault(name, Usage()).add(*numbers)

    def day(self) -> str:
        """Today in UTC, as 2026-01-31."""
        return time.strftime("%Y-%m-%d", time.gmtime(self._now()))

    def seconds_to_midnight(self) -> int:
        return 86400 - int(self._now()) % 86400

    def add(self, name: str, num_requests: int, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        numbers = (num_requests, num_prompt_tokens, num_generated_tokens)
        with self._lock:
            self._turn_the_page()
            self._totals.setdefault(name, Usage()).add(*numbers)
            self._today.setdefault(name, Usage()).add(*numbers)
            if self._database is not None:
                self._pending.setdefault((name, self._day), Usage()).add(*numbers)

    def total(self, name: str) -> Usage:
        with self._lock:
            return self._totals.get(name, Usage())

    def today(self, name: str) -> Usage:
        with self._lock:
            self._turn_the_page()
            return self._today.get(name, Usage())

    def _turn_the_page(self) -> None:
        day = self.day()
        if day != self._day:
            self._day = day
            self._today = {}

    def _write_on(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            self.flush()

    def flush(self) -> None:
        """Write what is new. When that fails it is kept for the next time."""
        with self._lock:
            pending, self._pending = self._pending, {}
        if self._database is None or not pending:
            return
        try:
            with self._database as db:
                db.executemany(
                    _ADD,
                    [
                        (name, day, u.num_requests, u.num_prompt_tokens, u.num_generated_tokens)
                        for (name, day), u in pending.items()
                    ],
                )
            self._warned = False
        except sqlite3.Error as e:
            if not self._warned:
                logger.error("usage counters cannot be written for now: %s", e)
                self._warned = True
            with self._lock:
                for slot, u in pending.items():
                    numbers = (u.num_requests, u.num_prompt_tokens, u.num_generated_tokens)
                    self._pending.setdefault(slot, Usage()).add(*numbers)

    def close(self) -> None:
        """Writes the rest. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)
        self.flush()
        if self._database is not None:
            self._database.close()
            self._database = None
