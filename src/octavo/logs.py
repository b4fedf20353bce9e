"""Log lines as JSON, one object a line, with the id of the request that they belong to."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

FORMATS = ("text", "json")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The X-Request-Id of the HTTP request that is being answered here; None outside of any."""

MAX_TEXT = 8192


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`; `process` (server or engine); `request_id`, `exception`, `request`.

    `request` are the facts of a finished request (--log-requests), as GET /v1/requests/ID tells them.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage()[:MAX_TEXT],
        }
        facts = getattr(record, "facts", None)
        found = facts["id"] if facts else request_id.get()
        if found is not None:
            line["request_id"] = found
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-MAX_TEXT:]
        if facts:
            line["request"] = facts
        return json.dumps(line, default=str)


def use(log_format: str, process: str) -> None:
    """From now on all log lines of this process have that format. `process` says which one it is."""
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter(process))
