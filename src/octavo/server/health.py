"""GET /health: what is true of this server now, told without asking the engine."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.failures import error_fields, json_response
from octavo.server.state import ServerState

BUSY_SECONDS = 1.0

# Why requests are not served just now.
REASONS = {
    "draining": "the server is shutting down",
    "failed": "the engine is not running",
    "restarting": "the engine is being restarted; requests wait for it",
    "hanging": "the engine made no progress and is being ended; requests wait for the next one",
    "stalled": "the engine process stands still: it is stopped, or gets no processor",
}


async def health(request: Request, state: ServerState) -> Response:
    """200 `ok`, or `busy` while a step takes long; 503 with the reason while nothing is computed."""
    status = "draining" if state.draining else state.client.state
    pulse = state.client.pulse  # read after the state, so that an engine called stalled is silent for long enough
    content: dict[str, Any] = {
        "status": status,
        "engine_restarts": state.client.num_restarts,
        "step_running_s": round(pulse.step, 3),
        "engine_silent_s": round(pulse.silent, 3),
    }
    if status == "running":
        content["status"] = "busy" if pulse.step > BUSY_SECONDS else "ok"
        return json_response(content)
    error = error_fields(REASONS[status], "server_error", None, status)
    return json_response({**content, **error}, 503, {"Retry-After": "1"})
