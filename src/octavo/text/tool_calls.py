"""Finds the tool calls in what a model writes, in each of the common formats, whole or as it streams."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

from octavo.text.json_call import JsonCall, JsonValue, is_object

BLANKS = " \t\r\n"
FORMATS = ("hermes", "llama3_json", "mistral", "json")

Machine = Generator[None, str | None, None]


@dataclass(slots=True)
class CallDelta:
    """News of call number `index`: its name, once, and then pieces of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add_call(self, index: int, name: str | None, arguments: str) -> None:
        if name is None and self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += arguments
        else:
            self.calls.append(CallDelta(index, name, arguments))


class ToolParser(Protocol):
    """Splits an answer into content and calls. However the text is cut into pieces, the parts are the same."""

    num_calls: int
    complete: bool  # has every call been read to its end, with arguments that are JSON?

    def push(self, text: str) -> Parsed: ...

    def flush(self) -> Parsed:
        """The answer is at its end."""
        ...


class _Reader:
    """The part that all formats share: text that may still become a call is held back, a call is told in pieces.

    A subclass yields from `_run`: it receives one character at a time, and None at the end. What is not a
    well-formed call of a known function stays text, with its marks; blanks around calls are dropped.
    """

    def __init__(self, names: frozenset[str], *, only_plain_heads: bool = False) -> None:
        """`only_plain_heads`: a call begins with its name, written without escapes, as grammars know it."""
        self._names = names
        self._only_plain_heads = only_plain_heads
        self._out = Parsed()
        self._held = ""  # read, but not yet told
        self._blanks = ""  # at the end of the content: they count only if more content follows
        self.num_calls = 0
        self.complete = True
        self._is_broken = False  # some call stayed incomplete
        self._machine = self._run()
        next(self._machine)

    def push(self, text: str) -> Parsed:
        for char in text:
            self._machine.send(char)
        return self._take()

    def flush(self) -> Parsed:
        self._machine.send(None)
        return self._take()

    def _take(self) -> Parsed:
        out, self._out = self._out, Parsed()
        return out

    def _run(self) -> Machine:
        raise AssertionError("a subclass says how it reads")

    # ------------------------------------------------------------------ content

    def _say(self, text: str) -> None:
        """Content, but blanks at its end wait: a call may follow."""
        kept = text.rstrip(BLANKS)
        if kept:
            self._out.content += self._blanks + kept
            self._blanks = ""
        self._blanks += text[len(kept) :]

    def _release(self) -> None:
        """What was held back is content after all."""
        held, self._held = self._held, ""
        self._say(held)

    def _end(self) -> Machine:
        self._release()
        if not self.num_calls:
            self._out.content += self._blanks
        self._blanks = ""
        while True:
            yield

    # ------------------------------------------------------------------ calls

    def _read_call(self, char: str) -> Generator[None, str | None, tuple[bool, str | None]]:
        """Reads an object from its first character on; returns whether it was a call, and what came after it."""
        call, told = JsonCall(only_plain_heads=self._only_plain_heads), 0
        index: int | None = None
        next_char: str | None = char
        while next_char is not None:
            call.push(next_char)
            if call.failed:
                break
            self._held += next_char
            if index is None and call.name is not None:
                if call.name not in self._names:
                    return False, (yield)
                if call.arguments or call.done:
                    index = self._begin(call.name)
            if index is not None and len(call.arguments) > told:
                self._out.add_call(index, None, call.arguments[told:])
                told = len(call.arguments)
            if call.done:
                self._held, self.complete = "", not self._is_broken
                return True, (yield)
            next_char = yield
        if index is not None:
            self._held = ""
            return True, next_char
        return False, next_char

    def _begin(self, name: str) -> int:
        index = self.num_calls
        self._out.add_call(index, name, "")
        self.num_calls += 1
        self._is_broken = self._is_broken or not self.complete
        self.complete = False
        self._held = self._blanks = ""
        return index

    def _skip_blanks(self, char: str | None) -> Generator[None, str | None, str | None]:
        while char is not None and char in BLANKS:
            self._held += char
            char = yield
        return char

    def _read_mark(self, mark: str, char: str | None) -> Generator[None, str | None, tuple[bool, str | None]]:
        """Is the text from `char` on `mark`? What was read of it is held."""
        for want in mark:
            if char != want:
                return False, char
            self._held += char
            char = yield
        return True, char


class _MarkedReader(_Reader):
    """Calls follow a mark, anywhere in the text. A subclass says which mark, and reads on after it."""

    OPEN = ""

    def _run(self) -> Machine:
        char: str | None = yield
        while char is not None:
            if char != self.OPEN[0]:
                self._say(char)
                char = yield
                continue
            found, char = yield from self._read_mark(self.OPEN, char)
            if found:
                char = yield from self._read_body((yield from self._skip_blanks(char)))
            self._release()
        yield from self._end()

    def _read_body(self, char: str | None) -> Generator[None, str | None, str | None]:
        """Reads from the first character after mark and blanks; returns the first that is none of its business."""
        raise AssertionError("a subclass says how it reads")


class MarkedParser(_MarkedReader):
    """Hermes and Qwen: <tool_call> {"name": ..., "arguments": {...}} </tool_call>, anywhere in the text."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def _read_body(self, char: str | None) -> Generator[None, str | None, str | None]:
        if char != "{":
            return char
        is_call, char = yield from self._read_call(char)
        if is_call and self.complete:
            char = yield from self._skip_blanks(char)
            closed, char = yield from self._read_mark(self.CLOSE, char)
            if closed or not self._held.strip(BLANKS):
                self._held = ""  # the closing mark may be missing
        return char


class MistralParser(_MarkedReader):
    """[TOOL_CALLS] and a list of objects, or name{...} or name[ARGS]{...} (the newer tokenizers)."""

    OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

    def _read_body(self, char: str | None) -> Generator[None, str | None, str | None]:
        if char == "[":
            return (yield from self._read_list(char))
        if char == "{":
            return (yield from self._read_call(char))[1]
        return (yield from self._read_named(char))

    def _read_list(self, char: str | None) -> Generator[None, str | None, str | None]:
        while char is not None and char in "[,":
            self._held += char
            char = yield from self._skip_blanks((yield))
            if char != "{":
                return char
            is_call, char = yield from self._read_call(char)
            if not is_call or not self.complete:
                return char
            char = yield from self._skip_blanks(char)
        if char == "]":
            self._held = ""
            char = yield
        return char

    def _read_named(self, char: str | None) -> Generator[None, str | None, str | None]:
        """The name, then maybe marks, then the object of the arguments, told like any other call."""
        name = ""
        while char is not None and char not in "{[" and len(name) < 64:
            name += char
            self._held += char
            char = yield
        while char == "[":
            mark = ""
            while char is not None and len(mark) < 32 and not mark.endswith("]"):
                mark += char
                self._held += char
                char = yield
            while mark == self.CALL_ID and char is not None and char not in "[{":
                self._held += char
                char = yield
            if mark not in (self.ARGS, self.CALL_ID):
                return char
        char = yield from self._skip_blanks(char)
        if char != "{" or name.strip(BLANKS) not in self._names:
            return char
        return (yield from self._read_arguments(name.strip(BLANKS), char))

    def _read_arguments(self, name: str, char: str) -> Generator[None, str | None, str | None]:
        index = self._begin(name)
        value = JsonValue(char)
        self._out.add_call(index, None, char)
        while True:
            next_char = yield
            if next_char is None:
                return None
            self._out.add_call(index, None, next_char)
            if value.push(next_char):
                self.complete = is_object(value.text) and not self._is_broken
                return (yield)


class JsonParser(_Reader):
    """The whole answer is one call or several: objects, one after another, with ; or , between, or a list of them.

    Llama 3 writes <|python_tag|> before it and says "parameters".
    """

    TAG = "<|python_tag|>"

    def _run(self) -> Machine:
        char: str | None = yield
        char = yield from self._skip_blanks(char)
        if char == self.TAG[0]:
            _, char = yield from self._read_mark(self.TAG, char)
            char = yield from self._skip_blanks(char)
        if char == "[":
            self._held += char
            char = yield from self._skip_blanks((yield))
        is_call = True
        while is_call and char == "{" and self.complete:
            is_call, char = yield from self._read_call(char)
            if is_call:
                char = yield from self._skip_blanks(char)
                if char is not None and char in ",;":
                    self._held += char
                    char = yield from self._skip_blanks((yield))
        if self.num_calls and char == "]":
            self._held, char = "", (yield)
        if self.num_calls and not self._held.strip(BLANKS + ",;"):
            self._held = ""
        self._release()
        while char is not None:
            self._say(char)
            char = yield
        yield from self._end()


PARSERS: dict[str, type[_Reader]] = {
    "hermes": MarkedParser,
    "llama3_json": JsonParser,
    "mistral": MistralParser,
    "json": JsonParser,
}


def format_of(template: str | None) -> str:
    """The format that a chat template speaks of; "json" where it speaks of none."""
    template = template or ""
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "python_tag" in template or "ipython" in template:
        return "llama3_json"
    return "json"
