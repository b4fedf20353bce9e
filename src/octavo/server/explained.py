"""The `octavo` object: why a request took as long as it did, in its answer, by its id, and in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import Any

from octavo.errors import EngineError, OctavoError
from octavo.server.client import EngineClient
from octavo.server.failures import RequestUnknownError
from octavo.server.generation import Generation

Stories = list[dict[str, Any] | None]
"""What the engine told of each prompt of a request (octavo.explain); None where it knows nothing any more."""

MAX_ENTRIES = 2048

logger = logging.getLogger("octavo.requests")


def explanation(stories: Stories, first_tokens: ListLike[float | None]) -> dict[str, Any]:
    """What the engine told of each prompt, and the front end's times from arrival to first token."""
    return {"prompts": [_prompt(total, story) for total, story in zip(first_tokens, stories, strict=True)]}


def _prompt(total: float | None, story: dict[str, Any] | None) -> dict[str, Any]:
    """`rest` is what is left of TTFT: tokenising, messages, and waiting again after a preemption."""
    ttft = None
    if total is not None and story is not None and story["queue_seconds"] is not None:
        queue, prefill = story["queue_seconds"], story["prefill_seconds"]
        ttft = {
            "total_seconds": round(total, 6),
            "queue_seconds": queue,
            "prefill_seconds": prefill,
            "rest_seconds": round(max(0.0, total - queue - prefill), 6),
        }
    return {"ttft": ttft, "engine": story}


async def explain(generation: Generation) -> None:
    """Make the `octavo` object of an answer; without it if the engine is gone, the answer itself is whole."""
    with contextlib.suppress(EngineError):
        stories = await generation.stories()
        generation.extension = explanation(stories, [p.first_token_seconds for p in generation.prompts])


class Entry:
    """A request that is or was answered, by its X-Request-Id. Once closed it holds numbers, no text."""

    def __init__(self, request_id: str, route: str, generation: Generation) -> None:
        self.request_id = request_id
        self.route = route
        self.tenant = generation.tenant
        self.began_ns = time.time_ns()
        self.traceparent = ""  # the W3C trace context that the client sent
        self._engine_ids = generation.engine_ids
        self._generation: Generation | None = generation
        self._facts: dict[str, Any] = {}
        self._first_tokens: list[float | None] = []

    def close(self) -> None:
        if self._generation is not None:
            self._note(self._generation)
            self._generation = None

    def _note(self, generation: Generation) -> None:
        self._first_tokens = [p.first_token_seconds for p in generation.prompts]
        self._facts = {
            "status": generation.status,
            "seconds": round(generation.elapsed, 6),
            "num_prompt_tokens": sum(len(p.token_ids) for p in generation.prompts),
            "num_generated_tokens": sum(c.num_tokens for c in generation.choices),
            "finish_reasons": [c.finish_reason and c.finish_reason.value for c in generation.choices],
        }

    async def describe(self, client: EngineClient) -> dict[str, Any]:
        """The whole story, asked of the engine now; what the engine no longer knows is null."""
        stories: Stories = [None] * len(self._engine_ids)
        with contextlib.suppress(OctavoError):  # the engine is gone; what the front end knows is still true
            stories = await client.explain(self._engine_ids)
        if self._generation is not None:
            self._note(self._generation)
        told = {"object": "request", "id": self.request_id, "route": self.route, **self._facts}
        return told | explanation(stories, self._first_tokens)


class RequestBook:
    """The last MAX_ENTRIES requests; of several with one id the latest."""

    def __init__(self, client: EngineClient, capacity: int = MAX_ENTRIES) -> None:
        self._client = client
        self._capacity = capacity
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_end: Callable[[dict[str, Any], Entry], None] | None = None  # hears the whole story of each

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, entry: Entry) -> None:
        self._entries[entry.request_id] = entry
        self._entries.move_to_end(entry.request_id)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def close(self, entry: Entry) -> None:
        """It has ended; it is logged and traced if anyone reads that."""
        entry.close()
        if logger.isEnabledFor(logging.INFO) or self.on_end is not None:
            task = asyncio.get_running_loop().create_task(self._log(entry))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def describe(self, request_id: str, tenant: str) -> dict[str, Any]:
        """Raises RequestUnknownError, also for another tenant's request."""
        entry = self._entries.get(request_id)
        if entry is None or entry.tenant != tenant:
            raise RequestUnknownError
        return await entry.describe(self._client)

    async def _log(self, entry: Entry) -> None:
        told = await entry.describe(self._client)
        logger.info("request %s: %s", entry.request_id, log_line(told), extra={"facts": told})
        if self.on_end is not None:
            self.on_end(told, entry)


def log_line(told: dict[str, Any]) -> str:
    """What `Entry.describe` tells, on one line of key=value; of many prompts or samples the first eight."""
    words = [told["route"], told["status"], f"seconds={told['seconds']:.3f}"]
    words += [f"prompt_tokens={told['num_prompt_tokens']}", f"generated_tokens={told['num_generated_tokens']}"]
    words.append("finish=" + ",".join(str(reason) for reason in told["finish_reasons"][:8]))
    for number, prompt in enumerate(told["prompts"][:8]):
        mark = f"[{number}]" if len(told["prompts"]) > 1 else ""
        words += [f"{name}{mark}={value}" for name, value in _facts(prompt)]
    return " ".join(words)


def _facts(prompt: dict[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if prompt["ttft"] is not None:
        facts += [(f"{name.removesuffix('_seconds')}_s", f"{value:.3f}") for name, value in prompt["ttft"].items()]
    if prompt["engine"] is not None:
        samples = prompt["engine"]["samples"]
        first = samples[0]
        waits = ",".join(f"{w['for']}:{w['seconds']:.3f}" for w in first["waits"])
        facts += [("waits", waits or "none"), ("hit", str(first["hit_tokens"])), ("miss", str(first["miss_reason"]))]
        facts += [("chunks", str(len(first["chunks"])))]
        facts += [("preemptions", str(sum(s["num_preemptions"] for s in samples)))]
        facts += [("lost_tokens", str(sum(p["lost_tokens"] for s in samples for p in s["preemptions"])))]
    return facts
