"""The messages between front end and engine loop: plain structs, passed as they are or as msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import (
    ConfigError,
    ContextLengthError,
    CorruptFileError,
    EngineError,
    ModelError,
    ModelNotFoundError,
    NeverFitsError,
    OctavoError,
    QueueFullError,
    RequestError,
    UnsupportedError,
)
from octavo.events import OutputEvent
from octavo.request import SamplingParams


class SubmitSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `request_id` must be unique among live requests."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    pin_seconds: float | None = None


class GenerationError(EngineError):
    """One request failed while it was admitted or computed; the engine lives on."""


class WireError(msgspec.Struct, frozen=True, kw_only=True):
    """An OctavoError on its way through a message."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int = 1


_KINDS: dict[str, type[OctavoError]] = {
    c.__name__: c
    for c in (
        ConfigError, ModelError, ModelNotFoundError, CorruptFileError, UnsupportedError, RequestError,
        ContextLengthError, NeverFitsError, QueueFullError, EngineError, GenerationError,
    )
}  # fmt: skip


def to_wire(error: OctavoError) -> WireError:
    if isinstance(error, RequestError):
        return WireError(
            kind=type(error).__name__,
            message=error.message,
            param=error.param,
            code=error.code,
            retry_after=getattr(error, "retry_after", 1),
        )
    return WireError(kind=type(error).__name__, message=str(error))


def from_wire(wire: WireError) -> OctavoError:
    """The same error again; an unknown kind becomes an EngineError."""
    kind = _KINDS.get(wire.kind, EngineError)
    if not issubclass(kind, RequestError):
        return kind(wire.message)
    error = kind.__new__(kind)  # the constructors build messages; this one exists already
    RequestError.__init__(error, wire.message, param=wire.param, code=wire.code)
    if isinstance(error, QueueFullError):
        error.retry_after = wire.retry_after
    return error


# Front end to engine.


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Add all of `specs` or, if one is refused, none. Answered by Admitted or Refused with the same ticket."""

    ticket: int
    specs: list[SubmitSpec]


class Abort(msgspec.Struct, tag="abort", frozen=True):
    request_ids: list[str]


class FinishSequence(msgspec.Struct, tag="finish", frozen=True):
    """The text layer found a stop string: end this sequence now; no more events for it."""

    request_id: str
    index: int


class GetStats(msgspec.Struct, tag="stats", frozen=True):
    ticket: int


class Explain(msgspec.Struct, tag="explain", frozen=True):
    """Answered by Explained: what happened to these requests."""

    ticket: int
    request_ids: list[str]


class GetCache(msgspec.Struct, tag="cache", frozen=True):
    """Answered by Told: Engine.cache_report."""

    ticket: int
    tenant: str | None
    limit: int


class Unpin(msgspec.Struct, tag="unpin", frozen=True):
    """Answered by Told: was there such a pin?"""

    ticket: int
    pin_id: str
    tenant: str | None


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    pass


Command = Submit | Abort | FinishSequence | GetStats | Explain | GetCache | Unpin | Shutdown


# Engine to front end.


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """How much of a stage of loading ("Downloading", "Loading") is done, from 0 to 1."""

    stage: str
    fraction: float


class Opened(msgspec.Struct, tag="opened", frozen=True):
    """The model's files are read; its weights are next. `tokenizer_source` is a pickle: a Path, or GGUF metadata."""

    tokenizer_source: bytes


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The model is loaded."""

    model_name: str
    max_model_len: int
    kv_cache_bytes: int
    vocab_size: int
    report: list[str]
    generation_config: dict[str, Any]
    chat_template: str | None = None


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot go on (or could not start); its last message."""

    error: WireError


class Admitted(msgspec.Struct, tag="admitted", frozen=True):
    ticket: int


class Deferred(msgspec.Struct, tag="deferred", frozen=True):
    """A Submit waits for its grammar to be compiled; Admitted or Refused follows."""

    ticket: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    ticket: int
    error: WireError


class Events(msgspec.Struct, tag="events", frozen=True):
    """All news of one step."""

    events: list[OutputEvent]


class Stats(msgspec.Struct, tag="stats_reply", frozen=True):
    """EngineStats by field name."""

    ticket: int
    values: dict[str, Any]


class Told(msgspec.Struct, tag="told", frozen=True):
    """The answer to GetCache and Unpin."""

    ticket: int
    value: Any


class Explained(msgspec.Struct, tag="explained", frozen=True):
    """One entry per id asked for; None for one that is unknown or too long ago."""

    ticket: int
    stories: list[dict[str, Any] | None]


Message = Progress | Opened | Ready | Failed | Admitted | Deferred | Refused | Events | Stats | Explained | Told
