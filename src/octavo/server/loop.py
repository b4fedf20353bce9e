"""The engine loop: takes commands, steps the engine, hands out events. The same in a thread and in a process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import EngineError, OctavoError
from octavo.server.compiling import CompileQueue, missing_grammar
from octavo.server.step_metrics import MeasuredBackend
from octavo.server.wire import (
    Abort,
    Admitted,
    Command,
    Deferred,
    Events,
    Explain,
    Explained,
    Failed,
    FinishSequence,
    GenerationError,
    GetCache,
    GetStats,
    Message,
    Refused,
    Shutdown,
    Stats,
    Submit,
    Told,
    Unpin,
    to_wire,
)

if TYPE_CHECKING:
    from octavo.engine import Engine
    from octavo.request import Request
    from octavo.server.heart import Heart

logger = logging.getLogger(__name__)


class Inbox(Protocol):
    """Where commands come from."""

    def receive(self, *, block: bool) -> list[Command]:
        """All commands that have arrived; with `block`, waits for the first one or for `wake`."""
        ...

    def wake(self) -> None:
        """From any thread: the present or the next `receive` does not wait."""
        ...


class EngineLoop:
    """Runs one engine until a Shutdown command.

    While nothing is to be computed it blocks on the inbox, so an idle server uses no CPU; while the
    engine is busy it only looks into the inbox between steps.
    """

    def __init__(
        self, engine: Engine, inbox: Inbox, emit: Callable[[Message], None], heart: Heart | None = None
    ) -> None:
        """`heart` shows a supervisor how long a step takes."""
        self._heart = heart
        self._engine = engine
        self._inbox = inbox
        self._emit = emit
        self._stopping = False
        # Terminal events of an abort come out of the next step, even if nothing is left to compute.
        self._flush = False
        engine.observe(num_recent=2048)
        self._measured = engine.backend = MeasuredBackend(engine.backend)
        self._compiling: CompileQueue | None = None
        if engine.grammars is not None:
            limit = engine.config.max_num_seqs + engine.config.max_num_waiting
            self._compiling = CompileQueue(engine.grammars, inbox.wake, max_sequences=limit)

    def run(self) -> None:
        """Returns after Shutdown. An exception of the engine itself is reported as Failed and ends the loop."""
        try:
            while not self._stopping:
                busy = self._flush or self._engine.has_unfinished
                commands = self._inbox.receive(block=not busy)
                if self._heart is not None:
                    self._heart.begin_step()
                for command in commands:
                    self._apply(command)
                self._add_compiled()
                if not self._stopping and (self._flush or self._engine.has_unfinished):
                    self._step()
                if self._heart is not None:
                    self._heart.end_step()
        except Exception as e:
            logger.exception("the engine loop failed")
            self._emit(Failed(to_wire(EngineError(f"the engine failed: {type(e).__name__}: {str(e)[:300]}"))))
        finally:
            if self._compiling is not None:
                self._compiling.close()

    def _step(self) -> None:
        self._flush = False
        events = self._engine.step()
        if events:
            self._emit(Events(events))

    def _apply(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._abort(request_id)
            self._flush = True
        elif isinstance(command, FinishSequence):
            if self._compiling is None or not self._compiling.finish_sequence(command.request_id, command.index):
                self._engine.finish_sequence(command.request_id, command.index)
        elif isinstance(command, GetStats):
            num_compiling = 0 if self._compiling is None else self._compiling.num_sequences
            more = {"step": self._measured.totals(), "num_compiling": num_compiling}
            self._emit(Stats(command.ticket, _plain(self._engine.stats()) | more))
        elif isinstance(command, GetCache):
            self._emit(Told(command.ticket, self._engine.cache_report(command.tenant, command.limit)))
        elif isinstance(command, Unpin):
            self._emit(Told(command.ticket, self._engine.unpin(command.pin_id, command.tenant)))
        elif isinstance(command, Explain):
            self._emit(Explained(command.ticket, [self._engine.explain(i) for i in command.request_ids]))
        elif isinstance(command, Shutdown):
            self._stopping = True

    def _submit(self, command: Submit) -> None:
        """All specs are checked before the first is added. What needs a new grammar is added once that is compiled."""
        with self._refusing(command.ticket):
            requests = [
                self._engine.make_request(
                    spec.request_id,
                    spec.prompt_token_ids,
                    spec.params,
                    eos_token_ids=frozenset(spec.eos_token_ids),
                    cache_salt=spec.cache_salt,
                    tenant=spec.tenant,
                    priority=spec.priority,
                    pin_seconds=spec.pin_seconds,
                    compile_grammar=False,
                )
                for spec in command.specs
            ]
            if self._compiling is not None and any(map(missing_grammar, requests)):
                self._compiling.add(command.ticket, requests)
                self._emit(Deferred(command.ticket))
            else:
                self._add(command.ticket, requests)

    @contextlib.contextmanager
    def _refusing(self, ticket: int) -> Iterator[None]:
        """Whatever goes wrong with a submission is its answer, and nobody else's."""
        try:
            yield
        except OctavoError as e:
            self._emit(Refused(ticket, to_wire(e)))
        except Exception as e:  # one odd request must not end the loop for everyone
            logger.exception("a request could not be admitted")
            error = GenerationError(f"the request could not be admitted ({type(e).__name__})")
            self._emit(Refused(ticket, to_wire(error)))

    def _add(self, ticket: int, requests: list[Request]) -> None:
        """A full queue takes back those already added."""
        added: list[str] = []
        try:
            for request in requests:
                self._engine.add_request(request)
                added.append(request.request_id)
        except Exception:
            self._take_back(added)
            raise
        self._emit(Admitted(ticket))

    def _add_compiled(self) -> None:
        for submitted in self._compiling.take_ready() if self._compiling is not None else ():
            with self._refusing(submitted.ticket):
                if submitted.error is not None:
                    raise submitted.error
                self._add(submitted.ticket, submitted.requests)
                for request_id, index in submitted.finished:
                    self._engine.finish_sequence(request_id, index)

    def _abort(self, request_id: str) -> None:
        gone = self._compiling.abort(request_id) if self._compiling is not None else None
        if gone is not None:
            self._emit(Refused(gone.ticket, to_wire(GenerationError("the request was aborted"))))
        self._engine.abort(request_id)

    def _take_back(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)
        self._flush = self._flush or bool(request_ids)


def _plain(stats: Any) -> dict[str, Any]:
    """An EngineStats as builtins; keys of nested tables become strings."""
    values = dataclasses.asdict(stats)
    return {
        name: {str(getattr(k, "value", k)): v for k, v in value.items()} if isinstance(value, dict) else value
        for name, value in values.items()
    }
