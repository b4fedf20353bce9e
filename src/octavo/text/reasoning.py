"""Splits an answer into what the model thinks, between <think> and </think>, and what it says."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"
BLANKS = " \t\r\n"


def speaks_of_thinking(template: str | None) -> bool:
    return CLOSE in (template or "") or OPEN in (template or "")


class ReasoningSplitter:
    """Feed it text; it returns (reasoning, content). However the text is cut, the parts are the same.

    `thinking`: the prompt has opened the thought already. Otherwise a thought is one only at the very start.
    Blanks around the marks belong to neither part.
    """

    __slots__ = ("_held", "_state", "_told")

    def __init__(self, *, thinking: bool) -> None:
        self._state = "thinking" if thinking else "start"
        self._held = ""
        self._told = False  # has the present part any text yet?

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        reasoning = ""
        if self._state == "start":
            self._start()
        if self._state == "thinking":
            reasoning = self._think()
        return reasoning, self._say()

    def _start(self) -> None:
        begun = self._held.lstrip(BLANKS)
        if begun.startswith(OPEN):
            self._held, self._state = begun[len(OPEN) :], "thinking"
        elif begun and not OPEN.startswith(begun):
            self._state, self._told = "saying", True

    def _think(self) -> str:
        if not self._told:
            self._held = self._held.lstrip(BLANKS)
        place = self._held.find(CLOSE)
        if place >= 0:
            thought, self._held = self._held[:place].rstrip(BLANKS), self._held[place + len(CLOSE) :]
            self._state, self._told = "saying", False
            return thought
        # Blanks, and what may become the mark, wait.
        cut = len(self._held)
        for length in range(min(len(CLOSE) - 1, cut), 0, -1):
            if CLOSE.startswith(self._held[cut - length :]):
                cut -= length
                break
        cut = len(self._held[:cut].rstrip(BLANKS))
        thought, self._held = self._held[:cut], self._held[cut:]
        self._told = self._told or bool(thought)
        return thought

    def _say(self) -> str:
        if self._state != "saying":
            return ""
        if not self._told:
            self._held = self._held.lstrip(BLANKS)
            self._told = bool(self._held)
        said, self._held = self._held, ""
        return said

    def flush(self) -> tuple[str, str]:
        """The answer is at its end."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            return held.rstrip(BLANKS), ""
        return "", held
