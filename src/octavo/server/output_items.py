"""The output of a chat as items of the Responses API (thoughts, text, function calls) and as its events."""

from __future__ import annotations

import uuid
from typing import Any

from octavo.server.answer import AnswerReader, Parts
from octavo.text.tool_calls import CallDelta

Event = tuple[str, dict[str, Any]]
"""Its name and fields."""


class OutputItems:
    """Items in the order in which they begin, one open at a time. `push` and `close` return events of a stream."""

    def __init__(self, reader: AnswerReader) -> None:
        self.items: list[dict[str, Any]] = []
        self._reader = reader
        self._open: str | None = None  # the type of the last item, while it is open
        self._calls: dict[int, dict[str, Any]] = {}

    def push(self, parts: Parts, logprobs: list[dict[str, Any]]) -> list[Event]:
        """`logprobs` belong to the text; where there is none they are left out."""
        events: list[Event] = []
        if parts.reasoning:
            events += self._text("reasoning", parts.reasoning, [])
        if parts.content or (logprobs and self._open == "message"):
            events += self._text("message", parts.content, logprobs)
        for call in parts.calls:
            events += self._call(call)
        return events

    def close(self, status: str) -> list[Event]:
        """The end of the answer, which has at least an empty text."""
        events = [] if self.items else self._begin("message", status="in_progress", role="assistant", content=[])
        if events:
            events += self._begin_part("message")
        return events + self._end(status)

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        if self._open != kind:
            events += self._end("completed")
            extra: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            events += self._begin(kind, status="in_progress", **extra, content=[])
            events += self._begin_part(kind)
        part = self.items[-1]["content"][0]
        part["text"] += text
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            part["logprobs"] += logprobs
            fields["logprobs"] = logprobs
        name = "output_text" if kind == "message" else "reasoning_text"
        return [*events, self._event(f"response.{name}.delta", **fields)]

    def _call(self, call: CallDelta) -> list[Event]:
        events: list[Event] = []
        if call.name is not None:
            call_id = self._reader.call_ids[call.index]
            events += self._end("completed")
            events += self._begin("function_call", status="in_progress", call_id=call_id, name=call.name, arguments="")
        item = self.items[-1]
        item["arguments"] += call.arguments
        if call.arguments:
            events.append(self._event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _begin(self, kind: str, **fields: Any) -> list[Event]:
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind]
        item = {"id": prefix + uuid.uuid4().hex, "type": kind, **fields}
        self.items.append(item)
        self._open = kind
        return [("response.output_item.added", {"output_index": len(self.items) - 1, "item": _copy(item)})]

    def _begin_part(self, kind: str) -> list[Event]:
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        return [self._event("response.content_part.added", content_index=0, part=_copy(part))]

    def _end(self, status: str) -> list[Event]:
        """Close the open item."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        item = self.items[-1]
        item["status"] = status
        events: list[Event] = []
        if kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._event("response.function_call_arguments.done", **done))
        else:
            part = item["content"][0]
            name = "output_text" if kind == "message" else "reasoning_text"
            fields = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if kind == "message" else {})
            events.append(self._event(f"response.{name}.done", content_index=0, **fields))
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        return [*events, ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})]

    def _event(self, name: str, /, **fields: Any) -> Event:
        return name, {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    """As it is now: the lists in it grow."""
    return {key: list(v) if isinstance(v, list) else v for key, v in value.items()}
