"""The engine loop: takes commands, steps the engine, hands out events. The same in a thread and in a process."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import EngineError, OctavoError
from octavo.server.step_metrics import MeasuredBackend
from octavo.server.wire import (
    Abort,
    Admitted,
    Command,
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
    from octavo.server.heart import Heart

logger = logging.getLogger(__name__)


class Inbox(Protocol):
    """Where commands come from."""

    def receive(self, *, block: bool) -> list[Command]:
        """All commands that have arrived; with `block`, waits for the first one."""
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

    def run(self) -> None:
        """Returns after Shutdown. An exception of the engine itself is reported as Failed and ends the loop."""
        try:
            while not self._stopping:
                busy = self._flush or self._engine.has_unfinished
                for command in self._inbox.receive(block=not busy):
                    self._apply(command)
                if not self._stopping and (self._flush or self._engine.has_unfinished):
                    self._step()
        except Exception as e:
            logger.exception("the engine loop failed")
            self._emit(Failed(to_wire(EngineError(f"the engine failed: {type(e).__name__}: {str(e)[:300]}"))))

    def _step(self) -> None:
        self._flush = False
        if self._heart is not None:
            self._heart.begin_step()
        events = self._engine.step()
        if self._heart is not None:
            self._heart.end_step()
        if events:
            self._emit(Events(events))

    def _apply(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._engine.abort(request_id)
            self._flush = True
        elif isinstance(command, FinishSequence):
            self._engine.finish_sequence(command.request_id, command.index)
        elif isinstance(command, GetStats):
            values = _plain(self._engine.stats()) | {"step": self._measured.totals()}
            self._emit(Stats(command.ticket, values))
        elif isinstance(command, GetCache):
            self._emit(Told(command.ticket, self._engine.cache_report(command.tenant, command.limit)))
        elif isinstance(command, Unpin):
            self._emit(Told(command.ticket, self._engine.unpin(command.pin_id, command.tenant)))
        elif isinstance(command, Explain):
            self._emit(Explained(command.ticket, [self._engine.explain(i) for i in command.request_ids]))
        elif isinstance(command, Shutdown):
            self._stopping = True

    def _submit(self, command: Submit) -> None:
        """All specs are checked before the first is added; a full queue takes back those already added."""
        added: list[str] = []
        try:
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
                )
                for spec in command.specs
            ]
            for request in requests:
                self._engine.add_request(request)
                added.append(request.request_id)
        except OctavoError as e:
            self._take_back(added)
            self._emit(Refused(command.ticket, to_wire(e)))
        except Exception as e:  # one odd request must not end the loop for everyone
            logger.exception("a request could not be admitted")
            self._take_back(added)
            error = GenerationError(f"the request could not be admitted ({type(e).__name__})")
            self._emit(Refused(command.ticket, to_wire(error)))
        else:
            self._emit(Admitted(command.ticket))

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
