"""Submissions whose grammars are being compiled: in a thread, so that the engine steps on for everyone else."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.constraint import Grammar, GrammarCompiler, StructuredOutputsParams
from octavo.errors import OctavoError, QueueFullError
from octavo.request import Request
from octavo.server.wire import GenerationError

logger = logging.getLogger(__name__)

Wish = StructuredOutputsParams


def missing_grammar(request: Request) -> Wish | None:
    return request.params.structured_outputs if request.grammar is None else None


@dataclass(eq=False, slots=True)
class Submitted:
    """What waits here: the requests of one Submit, and what has been said of them since.

    `finished`: (request id, sample) that the text layer has ended. `error`: why nothing becomes of it.
    """

    ticket: int
    requests: list[Request]
    finished: list[tuple[str, int]] = field(default_factory=list)
    error: OctavoError | None = None

    @property
    def num_sequences(self) -> int:
        return sum(request.params.num_sequences for request in self.requests)

    @property
    def missing(self) -> set[Wish]:
        return {wish for request in self.requests if (wish := missing_grammar(request)) is not None}


class CompileQueue:
    """Everything but the compiling itself belongs to the engine's thread.

    Wishes are compiled one after another in the order of their arrival, equal ones once. The thread touches no
    submission: it takes wishes and gives grammars.
    """

    def __init__(self, compiler: GrammarCompiler, wake: Callable[[], None], *, max_sequences: int) -> None:
        """`wake` is called, in the thread, when `take_ready` has news. At most `max_sequences` wait here."""
        self._compiler = compiler
        self._wake = wake
        self._max_sequences = max_sequences
        self._waiting: list[Submitted] = []
        self._fewer = False  # since the last look some requests were aborted; the rest of theirs may be ready
        self._news = threading.Condition()
        self._wishes: dict[Wish, None] = {}  # in line; guarded by _news
        self._current: Wish | None = None  # whose result is still to come; guarded by _news
        self._results: queue.SimpleQueue[tuple[Wish, Grammar | OctavoError]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False  # guarded by _news

    def close(self) -> None:
        """Let the thread end; what waits is not answered any more."""
        with self._news:
            self._closed = True
            self._news.notify()

    @property
    def num_sequences(self) -> int:
        return sum(submitted.num_sequences for submitted in self._waiting)

    def add(self, ticket: int, requests: list[Request]) -> None:
        """Some of `requests` lack their grammar. QueueFullError."""
        submitted = Submitted(ticket, requests)
        if self.num_sequences + submitted.num_sequences > self._max_sequences:
            raise QueueFullError(self.num_sequences)
        self._waiting.append(submitted)
        with self._news:
            self._wishes |= dict.fromkeys(submitted.missing - {self._current})
            self._news.notify()
        if self._thread is None:
            # A daemon: compiling cannot be interrupted, and the end of the process must not wait for it.
            self._thread = threading.Thread(target=self._compile_all, name="octavo-grammars", daemon=True)
            self._thread.start()

    def take_ready(self) -> list[Submitted]:
        """Those that have all their grammars by now, or an error, in the order of their arrival."""
        if self._results.empty() and not self._fewer:
            return []
        self._fewer = False
        while not self._results.empty():
            wish, result = self._results.get()
            for submitted in self._waiting:
                self._fill(submitted, wish, result)
        ready = [s for s in self._waiting if s.error is not None or not s.missing]
        self._waiting = [s for s in self._waiting if s not in ready]
        return ready

    def _fill(self, submitted: Submitted, wish: Wish, result: Grammar | OctavoError) -> None:
        if wish not in submitted.missing:
            return
        if isinstance(result, OctavoError):
            submitted.error = result
            return
        for request in submitted.requests:
            if request.params.structured_outputs == wish:
                request.grammar = result

    def abort(self, request_id: str) -> Submitted | None:
        """Forget a request; returns what it belonged to if nothing is left of that."""
        for submitted in self._waiting:
            kept = [request for request in submitted.requests if request.request_id != request_id]
            if len(kept) < len(submitted.requests):
                submitted.requests = kept
                self._fewer = True
                if not kept:
                    self._waiting.remove(submitted)
                    self._drop_unwanted()
                    return submitted
        return None

    def _drop_unwanted(self) -> None:
        wanted = {wish for submitted in self._waiting for wish in submitted.missing}
        with self._news:
            self._wishes = {wish: None for wish in self._wishes if wish in wanted}

    def finish_sequence(self, request_id: str, index: int) -> bool:
        """Is the request here? Then it remembers that this sample is over."""
        for submitted in self._waiting:
            if any(request.request_id == request_id for request in submitted.requests):
                submitted.finished.append((request_id, index))
                return True
        return False

    # ------------------------------------------------------------------ the thread

    def _compile_all(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or bool(self._wishes))
                if self._closed:
                    return
                self._current = wish = next(iter(self._wishes))
                del self._wishes[wish]
            result = self._compile(wish)
            with self._news:
                self._current = None  # before the result can be taken: whoever comes later must not wait for it
            self._results.put((wish, result))
            self._wake()

    def _compile(self, wish: Wish) -> Grammar | OctavoError:
        try:
            return self._compiler.compile(wish)
        except OctavoError as e:
            return e
        except Exception as e:  # one odd grammar must not end the thread for everyone
            logger.exception("a grammar could not be compiled")
            return GenerationError(f"the grammar could not be compiled ({type(e).__name__})")
