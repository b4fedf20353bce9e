"""Every error that Octavo raises on purpose.

    OctavoError
    ├── ConfigError              a flag, an argument or an OCTAVO_* variable is wrong (exit code 2)
    ├── ModelError               a model cannot be served (exit code 2)
    │   ├── ModelNotFoundError   no such file, alias or repository
    │   ├── CorruptFileError     a file breaks its format; names the file and the tensor
    │   └── UnsupportedError     a sound file that this version cannot run; names what is missing
    ├── RequestError             one request is refused; carries an HTTP status, `param` and `code`
    │   ├── ContextLengthError   the prompt leaves no room in the context
    │   ├── NeverFitsError       the KV pool can never hold the request
    │   └── QueueFullError       too many requests wait; try again later
    └── EngineError              the engine itself failed or is shutting down

Messages are one line, name the field, tensor or flag, and never echo unbounded input.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose."""


class ConfigError(OctavoError):
    """A flag, an argument or an OCTAVO_* variable is wrong."""


class ModelError(OctavoError):
    """A model cannot be served."""


class ModelNotFoundError(ModelError):
    """No such file, alias or repository."""


class CorruptFileError(ModelError):
    """A file breaks its own format."""


class UnsupportedError(ModelError):
    """A sound model that this version of Octavo cannot run."""


class RequestError(OctavoError):
    """One request is refused; everything else goes on.

    `param` names the offending field, `code` is the machine-readable reason of OpenAI's error
    object, `status` the HTTP status.
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt leaves no room in the model's context."""

    def __init__(self, num_prompt: int, max_model_len: int, *, param: str = "prompt") -> None:
        super().__init__(
            f"the prompt has {num_prompt} tokens, but the context holds {max_model_len} tokens "
            f"and at least one must be left for the answer",
            param=param,
            code="context_length_exceeded",
        )


class NeverFitsError(RequestError):
    """The KV pool can never hold the request, even alone."""

    def __init__(self, message: str, *, param: str = "prompt") -> None:
        super().__init__(message, param=param, code="kv_cache_exceeded")


class QueueFullError(RequestError):
    """The waiting queue is full; `retry_after` is in seconds."""

    status = 429

    def __init__(self, num_waiting: int, retry_after: int = 1) -> None:
        super().__init__(f"{num_waiting} requests already wait; try again in {retry_after} s", code="queue_full")
        self.retry_after = retry_after


class EngineError(OctavoError):
    """The engine itself failed or is shutting down."""
