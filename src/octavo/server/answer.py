"""What a chat's text is made of: thoughts, content and tool calls; for whole answers and for streams alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo.constraint import StructuredOutputsParams
from octavo.errors import RequestError
from octavo.request import FinishReason, SamplingParams
from octavo.server.tool_grammars import TEXT, answer_grammar, calls_grammar, mark, without
from octavo.server.tools import ToolPlan, tool_plan
from octavo.text.constraints import lark_of
from octavo.text.reasoning import CLOSE, OPEN, ReasoningSplitter, speaks_of_thinking
from octavo.text.tool_calls import PARSERS, CallDelta

if TYPE_CHECKING:
    from octavo.server.schema import ChatBody
    from octavo.server.state import ServerState
    from octavo.text.tokenizer import Tokenizer

REASONING_PARSERS = ("auto", "none", "think", "deepseek_r1", "qwen3")
TAIL_TOKENS = 16  # enough to hold the mark and the blanks after it
_BETWEEN = r"/[ \t\r\n]{1,8}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """How the answer to one chat is to be read. `thinking`: the prompt has opened a thought."""

    tools: ToolPlan | None = None
    splits_thoughts: bool = False
    thinking: bool = False
    may_think: bool = False

    def reader(self) -> AnswerReader:
        return AnswerReader(self)


def answer_plan(body: ChatBody, state: ServerState) -> AnswerPlan:
    """Before the prompt is known. Raises RequestError."""
    template = template_of(state)
    settings = state.settings
    splits = settings.reasoning_parser != "none" and (
        settings.reasoning_parser != "auto" or speaks_of_thinking(template)
    )
    tools = tool_plan(body, parser=settings.tool_call_parser, template=template)
    return AnswerPlan(tools=tools, splits_thoughts=splits)


def template_of(state: ServerState) -> str | None:
    return state.settings.chat_template or state.tokenizer.chat_template


def with_prompt(plan: AnswerPlan, tokenizer: Tokenizer, token_ids: list[int]) -> AnswerPlan:
    """Where the prompt ends decides whether the answer begins inside a thought."""
    if not plan.splits_thoughts:
        return plan
    tail = tokenizer.decode(token_ids[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    return replace(plan, thinking=tail.endswith(OPEN), may_think=not tail.endswith(CLOSE))


def with_plan(
    params: SamplingParams, plan: AnswerPlan, tokenizer: Tokenizer, template: str | None
) -> tuple[SamplingParams, bool]:
    """The sampling that the plan needs: its grammar, and marks that stay in the text. Are the tools its cause?"""
    wish = params.structured_outputs
    ruled = plan.tools is not None and not plan.tools.is_free
    if ruled or (wish is not None and (plan.tools is not None or plan.may_think)):
        wish = _composed(wish, plan, tokenizer, template)
    marks = {OPEN, CLOSE} if plan.splits_thoughts else set()
    if plan.tools is not None and plan.tools.format in ("hermes", "mistral"):
        marks |= {"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"}
    ids = {tokenizer.token_id(text) for text in marks} & tokenizer.special_ids
    return replace(params, structured_outputs=wish, skip_special_tokens=params.skip_special_tokens and not ids), ruled


def _composed(
    wish: StructuredOutputsParams | None, plan: AnswerPlan, tokenizer: Tokenizer, template: str | None
) -> StructuredOutputsParams:
    """A thought, where there may be one; then calls, or what the wish asks for, or text with calls in it."""
    tools = plan.tools
    rules: list[str] = []
    said = []
    if wish is not None and not (tools is not None and tools.forced):
        if wish.grammar is not None:
            if tools is None:
                return wish  # it rules the whole text, thoughts included
            raise RequestError("a grammar and tools exclude each other", param="tools", code="invalid_value")
        first, *others = lark_of(wish).split("\n")
        rules += ["wished: " + first.removeprefix("start: "), *others]
        said.append("wished")
    begin_thought = mark(tokenizer, OPEN)
    if tools is not None and wish is None and not tools.forced:
        is_text = plan.may_think and not plan.thinking and not begin_thought.startswith("<[")
        rules += answer_grammar(tokenizer, tools, template, not_at_start=OPEN if is_text else None)
        said.append("answer")
    elif tools is not None:
        rules += calls_grammar(tokenizer, tools, template)
        said.append("calls")
    thought = ""
    if plan.may_think:
        end = mark(tokenizer, CLOSE)
        if end.startswith("<["):  # spelled out in letters it ends a thought as well, to whoever reads the text
            rules += [f"thought: THOUGHT {end}", f"THOUGHT: {without(CLOSE)}"]
        else:
            rules.append(f"thought[suffix={end}]: /{TEXT}/")
        rules.append(f"BETWEEN: {_BETWEEN}")
        opened = "thought BETWEEN?"
        thought = opened + " " if plan.thinking else f"({begin_thought} {opened})? "
    start = f"start: {thought}({' | '.join(said)})"
    return StructuredOutputsParams(grammar="\n".join([start, *rules]))


@dataclass(slots=True)
class Parts:
    """News of one answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class AnswerReader:
    """The text of one choice as it grows; the parts are the same however it is cut."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._splitter = ReasoningSplitter(thinking=plan.thinking) if plan.splits_thoughts else None
        self._plan = plan
        self._calls = None
        if plan.tools is not None:
            ruled = not plan.tools.is_free
            self._calls = PARSERS[plan.tools.format](plan.tools.names, only_plain_heads=ruled)
        self.call_ids: list[str] = []

    def push(self, text: str, *, last: bool = False) -> Parts:
        parts = Parts(content=text)
        if self._splitter is not None:
            parts.reasoning, parts.content = self._splitter.push(text)
            if last:
                thought, rest = self._splitter.flush()
                parts.reasoning += thought
                parts.content += rest
        if self._calls is not None:
            found = self._calls.push(parts.content)
            parts.content, parts.calls = found.content, found.calls
            if last:
                rest_found = self._calls.flush()
                parts.content += rest_found.content
                parts.calls += rest_found.calls
        if self._plan.tools is not None:
            self.call_ids += [self._plan.tools.new_call_id() for call in parts.calls if call.name is not None]
        return parts

    def finish_reason(self, reason: FinishReason) -> str:
        """OpenAI's table: calls that are complete end with `tool_calls`, unless the client named the function."""
        tools, calls = self._plan.tools, self._calls
        if reason is FinishReason.STOP and tools is not None and calls is not None and calls.num_calls:
            return "tool_calls" if calls.complete and not tools.named else reason.value
        return reason.value


def call_deltas(reader: AnswerReader, calls: list[CallDelta]) -> list[dict[str, Any]]:
    """OpenAI's deltas: index, id, type and name first, then pieces of the arguments."""
    made = []
    for call in calls:
        if call.name is None:
            made.append({"index": call.index, "function": {"arguments": call.arguments}})
            continue
        function = {"name": call.name, "arguments": call.arguments}
        made.append({"index": call.index, "id": reader.call_ids[call.index], "type": "function", "function": function})
    return made


def whole_calls(reader: AnswerReader, calls: list[CallDelta]) -> list[dict[str, Any]]:
    """The same calls in one piece each."""
    made: list[dict[str, Any]] = []
    for call in calls:
        if call.name is not None:
            function = {"name": call.name, "arguments": call.arguments}
            made.append({"id": reader.call_ids[call.index], "type": "function", "function": function})
        else:
            made[call.index]["function"]["arguments"] += call.arguments
    return made
