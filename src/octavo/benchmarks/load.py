"""The load generator: sends prompts to an OpenAI-compatible server as they fall due and notes when text comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.benchmarks.http import HttpError, Target, fetch
from octavo.benchmarks.traffic import Prompt
from octavo.errors import ConfigError

COMPLETIONS, CHAT = "completions", "chat"
IDS, TEXT = "ids", "text"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Frame(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Frame).decode


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How to ask. `max_concurrency` None: as many as are due. `extra_body` is merged into every body."""

    target: Target
    model: str
    endpoint: str = COMPLETIONS
    prompt_kind: str = IDS
    temperature: float = 0.0
    ignore_eos: bool = True
    ask_usage: bool = True
    max_concurrency: int | None = None
    timeout: float = 600.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> bytes:
        body: dict[str, Any] = {"model": self.model, "stream": True, "temperature": self.temperature}
        if self.endpoint == CHAT:
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.token_ids if self.prompt_kind == IDS else prompt.text
        body["max_tokens"] = prompt.num_output
        if self.ask_usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({**body, **self.extra_body})

    @property
    def path(self) -> str:
        return "/chat/completions" if self.endpoint == CHAT else "/completions"


@dataclass(slots=True)
class Outcome:
    """What came of one request. Times are in seconds on one clock; `texts` are the moments when text arrived."""

    due: float
    sent: float = 0.0
    ended: float = 0.0
    texts: list[float] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    error: str | None = None


class _Reader:
    """Server-sent events as they arrive: one `data:` line each, possibly cut anywhere."""

    def __init__(self, outcome: Outcome, on_text: Callable[[], None]) -> None:
        self._outcome = outcome
        self._on_text = on_text
        self._rest = b""
        self.done = False

    def feed(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            frame = _decode(data)
        except msgspec.MsgspecError:
            self._outcome.error = "a chunk of the stream is not JSON of the OpenAI kind"
            return
        if frame.error is not None:
            self._outcome.error = _reason(frame.error)
        if frame.usage is not None:
            self._outcome.num_input = frame.usage.prompt_tokens
            self._outcome.num_output = frame.usage.completion_tokens
        for choice in frame.choices:
            delta = choice.delta
            if choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
                self._outcome.texts.append(now)
                self._on_text()


def _reason(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]


def _explain(status: int, body: bytes) -> str:
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        decoded = body.decode(errors="replace")
    if isinstance(decoded, dict):
        decoded = decoded.get("error", decoded.get("detail", decoded))
    return f"HTTP {status}: {_reason(decoded)}"


async def send(settings: LoadSettings, prompt: Prompt, due: float, on_text: Callable[[], None]) -> Outcome:
    """One request from start to end; an error becomes part of the outcome."""
    outcome = Outcome(due)
    reader = _Reader(outcome, on_text)
    body = settings.body(prompt)
    outcome.sent = time.perf_counter()
    try:
        status, answer = await fetch(settings.target, "POST", settings.path, body, reader.feed, settings.timeout)
        if status != 200:
            outcome.error = _explain(status, answer)
        elif not reader.done and not outcome.texts and outcome.error is None:
            outcome.error = "the answer is not a stream of server-sent events"
    except HttpError as error:
        outcome.error = str(error)
    outcome.ended = time.perf_counter()
    if not outcome.num_output:  # a server that reports no usage: a chunk is a token, nearly always
        outcome.num_output = len(outcome.texts)
    outcome.num_input = outcome.num_input or prompt.num_input
    return outcome


async def run_load(
    settings: LoadSettings,
    prompts: Sequence[Prompt],
    arrivals: Sequence[float],
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Outcome], float]:
    """All prompts, each when it is due and a place is free. Returns outcomes in order, and the moment of the start.

    `on_progress` hears of (requests ended, texts arrived) at most ten times a second.
    """
    places = asyncio.Semaphore(settings.max_concurrency) if settings.max_concurrency else None
    num_ended = num_texts = 0

    def on_text() -> None:
        nonlocal num_texts
        num_texts += 1

    async def one(prompt: Prompt, due: float) -> Outcome:
        nonlocal num_ended
        delay = due - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        if places is None:
            outcome = await send(settings, prompt, due, on_text)
        else:
            async with places:
                outcome = await send(settings, prompt, due, on_text)
        num_ended += 1
        return outcome

    async def watch() -> None:
        while on_progress is not None:
            on_progress(num_ended, num_texts)
            await asyncio.sleep(0.1)

    start = time.perf_counter()
    watcher = asyncio.create_task(watch())
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(prompt, start + arrival))
                for prompt, arrival in zip(prompts, arrivals, strict=True)
            ]
    finally:
        watcher.cancel()
    return [task.result() for task in tasks], start


async def first_model(target: Target, timeout: float) -> str:
    """The id of the first model that the server lists. Raises ConfigError."""
    body = bytearray()
    try:
        status, answer = await fetch(target, "GET", "/models", b"", body.extend, timeout)
        if status != 200:
            raise ConfigError(f"the server lists no models ({_explain(status, answer)}); say --model")
        name = msgspec.json.decode(bytes(body))["data"][0]["id"]
    except HttpError as error:
        raise ConfigError(str(error)) from None
    except (msgspec.MsgspecError, LookupError, TypeError):
        raise ConfigError("the server's list of models cannot be read; say --model") from None
    return str(name)
