"""Keeps an engine process running: when it dies or hangs, another one takes over every unfinished request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from octavo.errors import EngineError, OctavoError, QueueFullError, RequestError
from octavo.events import OutputEvent
from octavo.server.client import BaseEngineClient, RequestHandle
from octavo.server.heart import STALL_SECONDS, Pulse
from octavo.server.journal import ReplayError, Submission
from octavo.server.process import DEFAULT_ASSEMBLE, EngineProcess, StageProgress
from octavo.server.suspects import Suspects
from octavo.server.unanswered import Unanswered
from octavo.server.wire import (
    Abort,
    Admitted,
    Command,
    Deferred,
    Events,
    Explain,
    Failed,
    FinishSequence,
    GenerationError,
    GetCache,
    GetStats,
    Message,
    Opened,
    Ready,
    Refused,
    Submit,
    SubmitSpec,
    Unpin,
    from_wire,
)

logger = logging.getLogger(__name__)

CALM_SECONDS = 60.0  # an engine that lived this long starts the count of restarts anew
MAX_DELAY = 5.0
WATCH_INTERVAL = 0.2
MIN_SILENCE = 3.0  # whatever the limit is: a process that gets too little of the processor is not ended for that


class QuarantinedError(RequestError):
    """The engine died of an equal request twice."""

    def __init__(self) -> None:
        super().__init__(
            "the engine ended twice while it computed a request equal to this one; it is not tried again",
            code="request_quarantined",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """When to give an engine up, and when to give up altogether. Times in seconds."""

    max_restarts: int = 16  # in a row; 0: none
    step_timeout: float = 300.0  # a step (or an answer to a submission) that takes longer: the engine hangs
    max_held: int = 1024  # sequences that come while no engine can take them; more are answered with 429


class SupervisedEngineClient(BaseEngineClient):
    """The engine client of `octavo serve`. All but constructor, `wait_ready` and `kill` belong to the event loop."""

    def __init__(
        self,
        model: str,
        options: Any,
        *,
        assemble: str = DEFAULT_ASSEMBLE,
        supervision: SupervisorOptions | None = None,
        log_format: str = "text",
    ) -> None:
        """Starts the first engine process; `wait_ready` must follow."""
        super().__init__()
        self._model, self._options, self._assemble, self._log_format = model, options, assemble, log_format
        self._supervision = supervision or SupervisorOptions()
        # Requests without a seed get theirs here, so that a second engine draws the same.
        self._random = random.Random(getattr(options, "seed", None))
        self._submissions: dict[int, Submission] = {}  # by ticket, in the order of their arrival
        self._by_request: dict[str, Submission] = {}
        self._suspects = Suspects()
        self._stop = threading.Event()
        self._starter: threading.Thread | None = None
        self._watch: asyncio.Task[None] | None = None
        self._up = True
        self._hanging = False
        self._num_restarts = self._num_in_a_row = 0
        self._up_since = time.monotonic()
        self._unanswered = Unanswered()  # by the present engine
        self._process = self._new_process()

    def _new_process(self) -> EngineProcess:
        return EngineProcess(self._model, self._options, assemble=self._assemble, log_format=self._log_format)

    def wait_opened(self, progress: StageProgress | None = None) -> Opened:
        """Blocks until the model's files are read. Raises as wait_ready() does."""
        return self._process.wait_opened(progress)

    def wait_ready(self, progress: StageProgress | None = None) -> Ready:
        """Blocks until the model is loaded. Raises what went wrong: ConfigError, ModelError, EngineError."""
        ready = self._process.wait_ready(progress)
        # Later engines must take whatever this one takes, however much memory is free by then.
        if dataclasses.is_dataclass(self._options) and not isinstance(self._options, type):
            self._options = dataclasses.replace(
                self._options,
                max_model_len=ready.max_model_len,
                kv_cache_memory=ready.kv_cache_bytes,
                memory_utilization=None,
            )
        return ready

    async def start(self) -> None:
        await super().start()
        self._attach()
        self._watch = asyncio.create_task(self._watch_steps())

    # ------------------------------------------------------------------ what others see

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def state(self) -> str:
        if self._failure is not None:
            return "failed"
        if not self._up:
            return "restarting"
        if self._hanging:
            return "hanging"
        return "stalled" if self._process.heart.pulse().silent > STALL_SECONDS else "running"

    @property
    def pulse(self) -> Pulse:
        return self._process.heart.pulse() if self._up else Pulse()

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    async def submit(self, specs: Sequence[SubmitSpec]) -> RequestHandle:
        if self._suspects.quarantined(specs):
            raise QuarantinedError
        if not self._can_send and self._suspects.num_held >= self._supervision.max_held:
            raise QueueFullError(self._suspects.num_held)
        return await super().submit([self._with_seed(spec) for spec in specs])

    def _with_seed(self, spec: SubmitSpec) -> SubmitSpec:
        if spec.params.seed is not None:
            return spec
        params = dataclasses.replace(spec.params, seed=self._random.getrandbits(64))
        return msgspec.structs.replace(spec, params=params)

    def finish_sequence(self, request_id: str, index: int) -> None:
        submission = self._by_request.get(request_id)
        if submission is not None:
            entry = submission.entries[request_id]
            entry.done[index] = True
            if submission.sent:
                self._process.send(FinishSequence(request_id, index))
            if entry.finished:
                self._forget(request_id)

    async def _ask(self, make: Callable[[int], Command], handle: RequestHandle | None = None) -> Any:
        """Submissions wait for the next engine, questions do not."""
        if not self._up and handle is None and self._failure is None:
            raise EngineError("the engine is being restarted")
        return await super()._ask(make, handle)

    # ------------------------------------------------------------------ to the engine

    @property
    def _can_send(self) -> bool:
        return self._up and not self._suspects.isolating

    def _send(self, command: Command) -> None:
        if isinstance(command, Submit):
            handle = self._handles[command.specs[0].request_id]
            submission = Submission(command.ticket, command.specs, handle)
            self._submissions[command.ticket] = submission
            for spec in command.specs:
                self._by_request[spec.request_id] = submission
            if self._can_send:
                self._send_submission(submission)
            else:
                self._suspects.hold(submission)
            return
        if isinstance(command, GetStats | Explain | GetCache | Unpin):
            self._unanswered.ask(command.ticket)
        if self._up:
            self._process.send(command)

    def _send_submission(self, submission: Submission) -> None:
        self._unanswered.ask(submission.ticket)
        for command in submission.commands():
            self._process.send(command)

    def _send_next_groups(self) -> None:
        while self._up and (group := self._suspects.next_group()):
            for submission in group:
                self._send_submission(submission)

    def _release(self, handle: RequestHandle) -> None:
        open_ids = sorted(handle.open_ids)
        sent = [i for i in open_ids if (s := self._by_request.get(i)) is not None and s.sent]
        for request_id in handle.request_ids:
            self._handles.pop(request_id, None)
            self._forget(request_id)
        handle.open_ids.clear()
        if sent and self._up:
            self._process.send(Abort(sent))
        self._send_next_groups()

    def _forget(self, request_id: str) -> None:
        submission = self._by_request.pop(request_id, None)
        if submission is not None:
            del submission.entries[request_id]
            if not submission.entries:
                self._submissions.pop(submission.ticket, None)

    # ------------------------------------------------------------------ from the engine

    def deliver(self, message: Message) -> None:
        if isinstance(message, Events):
            for event in message.events:
                self._deliver_event(event)
            if self._suspects.isolating:
                self._send_next_groups()
        elif isinstance(message, Failed):
            logger.error("%s", message.error.message)  # its process ends, and that is dealt with
        elif isinstance(message, Deferred):
            self._unanswered.defer(message.ticket)
        else:
            ticket = getattr(message, "ticket", 0)
            self._unanswered.answer(ticket)
            submission = self._submissions.get(ticket)
            if isinstance(message, Admitted) and submission is not None:
                submission.admitted = True
            elif isinstance(message, Refused) and submission is not None and submission.admitted:
                self._fail_submission(submission, from_wire(message.error))
            super().deliver(message)

    def _deliver_event(self, event: OutputEvent) -> None:
        submission = self._by_request.get(event.request_id)
        if submission is None:
            return
        entry = submission.entries[event.request_id]
        try:
            news = entry.take(event)
        except ReplayError as e:
            logger.error("request %s: %s", event.request_id, e)
            self._fail_submission(submission, e)
            return
        if news is not None:
            submission.handle.put(news)
        if entry.finished:
            self._forget(event.request_id)

    def _fail_submission(self, submission: Submission, error: OctavoError) -> None:
        """Its client is told; what is left of it is forgotten here and in the engine."""
        waiting = self._tickets.get(submission.ticket)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_exception(error)
        submission.handle.fail(error)
        ids = sorted(submission.entries)
        for request_id in ids:
            self._forget(request_id)
        if submission.sent and self._up:
            self._process.send(Abort(ids))

    # ------------------------------------------------------------------ when it ends

    def _attach(self) -> None:
        """Listen to the present process."""
        loop, process = self._loop, self._process
        assert loop is not None
        process.start_reader(
            lambda messages: _void(loop.call_soon_threadsafe(self._deliver_all, process, messages)),
            lambda error: _void(loop.call_soon_threadsafe(self._ended, process, error)),
        )

    def _deliver_all(self, process: EngineProcess, messages: list[Message]) -> None:
        if process is self._process and self._up:
            for message in messages:
                self.deliver(message)

    async def _watch_steps(self) -> None:
        """An engine that stands still, whose step does not end, or that leaves a question unanswered, is killed."""
        limit = self._supervision.step_timeout
        while True:
            before = time.monotonic()
            await asyncio.sleep(WATCH_INTERVAL)
            now = time.monotonic()
            if not self._up or self._hanging or now - before > STALL_SECONDS:
                continue  # who stood still as well (a paused container) cannot judge yet
            pulse = self._process.heart.pulse()
            if max(pulse.step, self._unanswered.seconds()) > limit or pulse.silent > max(limit, MIN_SILENCE):
                logger.error("the engine made no progress for %g s and is ended", limit)
                self._hanging = True
                self._process.signal_kill()

    def _ended(self, process: EngineProcess, error: OctavoError) -> None:
        """The process is gone; `error` says how."""
        if process is not self._process or self._stop.is_set() or self._failure is not None:
            return
        self._up = self._hanging = False
        self._unanswered.clear()
        had = [s for s in self._submissions.values() if s.sent]
        for ticket, waiting in list(self._tickets.items()):
            if ticket not in self._submissions and not waiting.future.done():
                waiting.future.set_exception(EngineError("the engine is being restarted"))
        if time.monotonic() - self._up_since > CALM_SECONDS:
            self._num_in_a_row = 0
        culprit = self._suspects.engine_ended(had)
        if culprit is not None:
            logger.error("the engine ended twice with one request alone: that request is given up")
            self._fail_submission(culprit, GenerationError("the engine ended twice while it computed this request"))
        self._restart(error, len(had))

    def _restart(self, error: OctavoError, num_requests: int) -> None:
        limit = self._supervision.max_restarts
        if self._num_in_a_row >= limit:
            self.fail(EngineError(str(error)))
            return
        delay = 0.0 if self._num_in_a_row == 0 else min(MAX_DELAY, 0.1 * 2**self._num_in_a_row)
        self._num_in_a_row += 1
        self._num_restarts += 1
        logger.error(
            "%s; restart %d of at most %d in a row, %d requests continue there",
            error, self._num_in_a_row, limit, num_requests,
        )  # fmt: skip
        self._starter = threading.Thread(target=self._start_another, args=(delay,), name="octavo-restart", daemon=True)
        self._starter.start()

    def _start_another(self, delay: float) -> None:
        """In a thread: clean up after the old process, wait, start a new one and wait for its model."""
        loop = self._loop
        assert loop is not None
        try:
            self._process.kill()
            if self._stop.wait(delay):
                return
            self._process = self._new_process()
            if self._stop.is_set():
                self._process.kill()
                return
            self._process.wait_ready()
        except OctavoError as e:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._restart_failed, e)
        except Exception as e:
            error = EngineError(f"no engine process could be started: {type(e).__name__}: {str(e)[:200]}")
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._restart_failed, error)
        else:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._restarted)

    def _restart_failed(self, error: OctavoError) -> None:
        if not self._stop.is_set():
            self._restart(error, len(self._submissions))

    def _restarted(self) -> None:
        if self._stop.is_set():
            return
        self._up = True
        self._up_since = time.monotonic()
        self._attach()
        self._send_next_groups()

    # ------------------------------------------------------------------ the end of all

    def fail(self, error: OctavoError) -> None:
        self._up = False
        super().fail(error)

    async def close(self) -> None:
        """Ends the engine process: kindly, then not."""
        self._stop.set()
        self.on_failure = None
        if self._watch is not None:
            self._watch.cancel()
        self.fail(EngineError("the server is shutting down"))
        if self._starter is not None and self._starter.is_alive():
            await asyncio.to_thread(self.kill)
        else:
            await asyncio.to_thread(self._process.end, 2.0)

    def kill(self) -> None:
        """No process, thread, socket or file stays behind. Idempotent."""
        self._stop.set()
        starter = self._starter
        while starter is not None and starter.is_alive():
            self._process.signal_kill()  # the starter sees its end and cleans up
            starter.join(0.05)
        self._process.kill()


def _void(handle: object) -> None:
    """call_soon_threadsafe returns a handle that nobody needs."""
