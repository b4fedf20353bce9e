"""The output of a chat as blocks of Anthropic's Messages API (thoughts, text, tool use) and as its events."""

from __future__ import annotations

import json
from typing import Any

from octavo.server.answer import AnswerReader, Parts

Event = tuple[str, dict[str, Any]]
"""Its name and fields."""


class OutputBlocks:
    """Blocks in the order in which they begin, one open at a time. `push` and `close` return events of a stream."""

    def __init__(self, reader: AnswerReader) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._reader = reader
        self._open: str | None = None  # the type of the last block, while it is open
        self._arguments = ""

    def push(self, parts: Parts) -> list[Event]:
        events: list[Event] = []
        if parts.reasoning:
            events += self._begin("thinking", thinking="", signature="")
            self.blocks[-1]["thinking"] += parts.reasoning
            events.append(self._delta("thinking_delta", thinking=parts.reasoning))
        if parts.content:
            events += self._begin("text", text="")
            self.blocks[-1]["text"] += parts.content
            events.append(self._delta("text_delta", text=parts.content))
        for call in parts.calls:
            if call.name is not None:
                events += self.close()
                events += self._begin("tool_use", id=self._reader.call_ids[call.index], name=call.name, input={})
            self._arguments += call.arguments
            if call.arguments:
                events.append(self._delta("input_json_delta", partial_json=call.arguments))
        return events

    def close(self) -> list[Event]:
        """The end of the open block, if there is one. A call that was cut has no input: a part would be wrong."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        if kind == "tool_use":
            self.blocks[-1]["input"] = _object(self._arguments) or {}
            self._arguments = ""
        return [("content_block_stop", {"index": len(self.blocks) - 1})]

    def _begin(self, kind: str, **fields: Any) -> list[Event]:
        if self._open == kind:
            return []
        events = self.close()
        block = {"type": kind, **fields}
        self.blocks.append(block)
        self._open = kind
        return [*events, ("content_block_start", {"index": len(self.blocks) - 1, "content_block": dict(block)})]

    def _delta(self, kind: str, **fields: Any) -> Event:
        return "content_block_delta", {"index": len(self.blocks) - 1, "delta": {"type": kind, **fields}}


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
