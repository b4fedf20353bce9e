"""Tool calls as grammars: calls that must be made, and answers in which calls, once begun, follow their schemas.

A call that must be made is all of the text. Where the model decides, its text is free up to what begins a call in
its format: the opening mark, or the object that names one of the functions. From there on only that call is possible.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.server.tools import ToolPlan
from octavo.text.constraints import lark_json, lark_string

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

MAX_CALLS = 16
CALL_BLANKS = " "  # calls are written on one line
COMMA = '", "'
ANY_OBJECT = {"type": "object"}
TEXT = "(?s:.*)"
BLANKS = r"[ \t\r\n]*"
TAG = "<|python_tag|>"
QUOTE = r'"\""'
OBJECT = r'/\{ ?"name" ?: ?"/'


def mark(tokenizer: Tokenizer, text: str) -> str:
    """A mark of the format in Lark: special tokens are no text there."""
    token_id = tokenizer.token_id(text)
    if token_id is not None and tokenizer.is_special(token_id):
        return f"<[{token_id}]>"
    return lark_string(text)


def calls_grammar(tokenizer: Tokenizer, plan: ToolPlan, template: str | None) -> list[str]:
    """Lark rules of which the first, `calls`, is what must be said: one call, or some of them."""
    plan = replace(plan, schemas={name: plan.schemas[name] for name in plan.forced or plan.schemas})
    several = plan.parallel and not plan.named
    if plan.format in ("hermes", "mistral"):
        call = _marked(tokenizer, plan, template, several)
        calls = _some("marked", several and call.repeats, call.between)
        return [f"calls: {calls}", f"marked: {mark(tokenizer, call.begin)} {call.body}", *call.rules]
    objects = _objects(plan, {"a_call": OBJECT})
    if plan.format == "llama3_json":
        return ["calls: " + _some("a_call", several, '"; "'), *objects]
    in_list = f' | "[" {_some("a_call", several, COMMA)} "]"' if several else ""
    return [f"calls: a_call{in_list}", *objects]


def answer_grammar(
    tokenizer: Tokenizer, plan: ToolPlan, template: str | None, *, not_at_start: str | None = None
) -> list[str]:
    """Lark rules of which the first, `answer`, is any text in which calls are as they should be.

    `not_at_start`: a text that the answer does not begin with, since that would be something else.
    """
    schemas = {name: schema if name in plan.strict else ANY_OBJECT for name, schema in plan.schemas.items()}
    plan = replace(plan, schemas=schemas)
    excluded = f" & ~/{BLANKS}{_regex(not_at_start)}{TEXT}/" if not_at_start is not None else ""
    if plan.format in ("hermes", "mistral"):
        return _marked_answer(tokenizer, plan, template, excluded)
    return _object_answer(plan, excluded)


def _some(one: str, several: bool, separator: str = "") -> str:
    return f"{one}{_more(one, separator)}" if several else one


def _more(one: str, separator: str = "") -> str:
    return f" ({separator} {one}){{0,{MAX_CALLS - 1}}}"


# ---------------------------------------------------------------- formats with an opening mark


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marked:
    """A call in Lark: its opening mark, what follows it, the rules for that, and can such calls follow each other?"""

    begin: str
    body: str
    rules: list[str]
    repeats: bool
    between: str = ""


def _marked(tokenizer: Tokenizer, plan: ToolPlan, template: str | None, several: bool) -> _Marked:
    if plan.format == "mistral" and "[ARGS]" in (template or ""):
        args = mark(tokenizer, "[ARGS]")
        named = [f"({_names(group)}) {args} args_{i}" for i, group in enumerate(_groups(plan))]
        rules = ["named: " + " | ".join(named), *_arguments(plan)]
        return _Marked(begin="[TOOL_CALLS]", body="named", rules=rules, repeats=True)
    objects = _objects(plan, {"a_call": OBJECT})
    if plan.format == "mistral":
        body = f'"[" {_some("a_call", several, COMMA)} "]"'
        return _Marked(begin="[TOOL_CALLS]", body=body, rules=objects, repeats=False)
    body = f'"\\n" a_call "\\n" {mark(tokenizer, "</tool_call>")}'
    return _Marked(begin="<tool_call>", body=body, rules=objects, repeats=True, between='"\\n"')


def _marked_answer(tokenizer: Tokenizer, plan: ToolPlan, template: str | None, excluded: str) -> list[str]:
    """Text, and calls that begin with a mark, anywhere in it."""
    call = _marked(tokenizer, plan, template, plan.parallel)
    begin, literal, text = mark(tokenizer, call.begin), _regex(call.begin), without(call.begin)
    more = f" later{{0,{MAX_CALLS - 1}}}" if plan.parallel and call.repeats else ""
    rules = [f"answer: PROSE | first{more} REST", f"PROSE: {text}{excluded}", f"REST: {text}"]
    for name, before, limits in (("first", "PROSE", excluded), ("later", "REST", "")):
        if begin.startswith("<["):
            rules.append(f"{name}: {before} {begin} {call.body}")
        else:
            rules += [f"{name}: {name}_head {call.body}", f"{name}_head[lazy]: {name.upper()}_HEAD"]
            rules.append(f"{name.upper()}_HEAD: /{TEXT}{literal}/{limits}")
    return [*rules, *call.rules]


# ---------------------------------------------------------------- formats that are an object


def _object_answer(plan: ToolPlan, excluded: str) -> list[str]:
    """A call, or some, in a list or not; or text that does not begin with an object that names a function."""
    start = f"{BLANKS}({_regex(TAG)})?{BLANKS}"
    head = rf'\{{{BLANKS}"name"{BLANKS}:{BLANKS}"'
    some_name = "|".join(map(_regex, plan.schemas))
    alone = _more("a_call", '"; "') if plan.parallel and plan.format == "llama3_json" else ""
    in_list = _more("a_call", COMMA) if plan.parallel else ""
    places = {"first": f"/{start}{head}/", "listed": f"/{start}\\[{BLANKS}{head}/", "a_call": OBJECT}
    return [
        f'answer: PROSE | first{alone} | listed{in_list} "]"',
        f'PROSE: /{TEXT}/ & ~/{start}(\\[{BLANKS})?{head}({some_name})"{TEXT}/{excluded}',
        *_objects(plan, places),
    ]


# ---------------------------------------------------------------- objects


def _objects(plan: ToolPlan, places: dict[str, str]) -> list[str]:
    """{"name": …, "arguments": {…}} with one of the names and its arguments, as a rule for each of `places`.

    What such an object begins with is a terminal; the values of `places` are that up to the name. With the name it
    becomes one terminal, so that other text is possible up to the last character of the name.
    """
    groups, key = _groups(plan), "parameters" if plan.format == "llama3_json" else "arguments"
    rules = []
    for place, begin in places.items():
        upper = place.upper()
        rules.append(f"{place}: " + " | ".join(f"{upper}_{i} KEY args_{i} CLOSE" for i in range(len(groups))))
        rules.append(f"{upper}: {begin}")
        rules += [f"{upper}_{i}: {upper} ({_names(group)}) {QUOTE}" for i, group in enumerate(groups)]
    rules += [f'KEY: / ?, ?"{key}" ?: ?/', r"CLOSE: / ?\}/", *_arguments(plan)]
    return rules


def _arguments(plan: ToolPlan) -> list[str]:
    """The rules args_0, args_1 …, one for each group."""
    schemas = [plan.schemas[group[0]] for group in _groups(plan)]
    return [f"args_{i}: {lark_json(schema, whitespace=CALL_BLANKS)}" for i, schema in enumerate(schemas)]


def _groups(plan: ToolPlan) -> list[list[str]]:
    """Names of functions whose arguments follow the same schema."""
    groups: dict[str, list[str]] = {}
    for name, schema in plan.schemas.items():
        groups.setdefault(json.dumps(schema), []).append(name)
    return list(groups.values())


def _names(group: list[str]) -> str:
    return " | ".join(map(lark_string, group))


def without(text: str) -> str:
    """Any text in which this one does not occur, as a terminal."""
    return f"/{TEXT}/ & ~/{TEXT}{_regex(text)}{TEXT}/"


def _regex(text: str) -> str:
    """The text itself, inside of /…/. Not all marks may be escaped: \\< is the beginning of a word."""
    return re.sub(r"[-.+*?()|\[\]{}^$/\\&~#]", lambda found: "\\" + found[0], text)
