"""Chat messages to prompt tokens, through the model's Jinja template.

Templates are set up as transformers sets them up, so that prompts are the same to the token. One thing
differs unless `trust_special_tokens` is given: the text of a special token inside what the client sent
is tokenised as plain text, so that nobody can forge a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import RequestError
from octavo.text.messages import check_messages

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer

_MAX_ERROR = 500
_MAX_DEPTH = 64
# Private-use characters; each stands for one special token's text while the template runs.
_PRIVATE_USE = range(0xE000, 0xF8F0)
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    trust_special_tokens: bool = False,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of the conversation as the template writes it; adds no BOS of its own.

    `chat_template` replaces the model's. RequestError for bad messages, no template
    (code "no_chat_template") and whatever the template refuses, with its words.
    """
    text, literals = _render(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
        trust_special_tokens=trust_special_tokens,
        tools=tools,
        template_kwargs=template_kwargs,
    )
    try:
        if literals:
            return tokenizer.encode_literals(text, literals)
        return tokenizer.encode(text, add_special_tokens=False)
    except RequestError as error:
        error.param = "messages"  # which is what the client calls its text here
        raise


def render_chat_text(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    """The text of `render_chat`, which takes the same options."""
    text, literals = _render(tokenizer, messages, **options)
    return text.translate(str.maketrans(dict[str, str | int | None](literals)))


def _render(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    trust_special_tokens: bool = False,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> tuple[str, dict[str, str]]:
    """The rendered text and the placeholders in it with what they stand for."""
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
            code="invalid_value",
        )
    template = chat_template if chat_template is not None else tokenizer.chat_template
    if not template:
        raise RequestError(
            "the model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    chat = check_messages(messages, template)
    inputs: dict[str, Any] = {"messages": chat, "tools": tools or None, "kwargs": template_kwargs or {}}
    private = _unused_private_characters(template, inputs)
    literals: dict[str, str] = {}
    if not trust_special_tokens and tokenizer.special_text_pattern is not None:
        inputs = _hide_special_text(inputs, tokenizer.special_text_pattern, private, literals)
    tag = next(private) if continue_final_message else ""
    if continue_final_message:
        _tag_final_message(inputs["messages"], tag)
    context: dict[str, Any] = {
        **tokenizer.special_tokens,
        **inputs["kwargs"],
        "messages": inputs["messages"],
        "tools": inputs["tools"],
        "documents": inputs["kwargs"].get("documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    text = _run_template(template, context)
    if literals:
        text = _unescape_placeholders(text, literals)
    if continue_final_message:
        text = _cut_at_tag(text, tag)
    return text, literals


# ---------------------------------------------------------------- special tokens in what the client sent


def _strings(value: object, depth: int = 0) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise RequestError("the messages are nested too deeply", param="messages", code="invalid_value")
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key, depth + 1)
            yield from _strings(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, depth + 1)


def _map_strings(value: Any, function: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {_map_strings(k, function): _map_strings(v, function) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, function) for item in value]
    return value


def _unused_private_characters(template: str, inputs: dict[str, Any]) -> Iterator[str]:
    """Private-use characters that neither the template nor the client uses, in JSON escapes neither.

    There are 6,384 of them; RequestError when a client uses all.
    """
    used: set[str] = set()
    for s in (template, *_strings(inputs)):
        if not s.isascii():
            used.update(c for c in s if "\ue000" <= c <= "\uf8ff")
        if "\\u" in s:
            used.update(chr(int(code, 16)) for code in _ESCAPE.findall(s))
    yield from (chr(i) for i in _PRIVATE_USE if chr(i) not in used)
    raise RequestError("the messages use every private-use character", param="messages", code="invalid_value")


def _hide_special_text(
    inputs: dict[str, Any], pattern: re.Pattern[str], private: Iterator[str], literals: dict[str, str]
) -> dict[str, Any]:
    """Puts one private-use character, noted in `literals`, in place of each special token's text.

    A single character that no template inspects survives trimming, splitting and joining; what the
    template writes itself is not touched. Where nothing special occurs nothing changes.
    """
    if not any(pattern.search(s) for s in _strings(inputs)):
        return inputs
    placeholder_of: dict[str, str] = {}

    def placeholder(match: re.Match[str]) -> str:
        special = match[0]
        if special not in placeholder_of:
            placeholder_of[special] = next(private)
            literals[placeholder_of[special]] = special
        return placeholder_of[special]

    hidden: dict[str, Any] = _map_strings(inputs, lambda s: pattern.sub(placeholder, s))
    return hidden


def _unescape_placeholders(text: str, literals: dict[str, str]) -> str:
    """Templates may write JSON in ASCII, where a placeholder reads \\ue000; make it the character again."""
    for placeholder in literals:
        text = text.replace(f"\\u{ord(placeholder):04x}", placeholder)
    return text


# ---------------------------------------------------------------- continuing the last message


def _tag_final_message(messages: list[dict[str, Any]], tag: str) -> None:
    """Marks the end of the last message's content, with a space after the mark to see whether templates trim."""
    messages[-1] = {**messages[-1], "content": messages[-1]["content"] + tag + " "}


def _cut_at_tag(text: str, tag: str) -> str:
    """The text up to the mark. A template that trims contents had it trimmed before, as in transformers."""
    place = text.rfind(tag)
    if place < 0:
        raise RequestError(
            "the chat template does not write the last message, so it cannot be continued",
            param="continue_final_message",
            code="invalid_value",
        )
    head = text[:place]
    return head if text[place + 1 : place + 2] == " " else head.rstrip()


# ---------------------------------------------------------------- the template engine


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's own words for training; here it is a block."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    return _environment().from_string(template)


def _run_template(template: str, context: dict[str, Any]) -> str:
    try:
        return _compile(template).render(**context)
    except TemplateSyntaxError as error:
        message = f"the chat template is broken in line {error.lineno}: {error.message}"
    except TemplateError as error:
        message = f"the chat template refuses the messages: {error.message or type(error).__name__}"
    except Exception as error:  # a template is a program and may fail in any way
        message = f"the chat template failed on these messages: {type(error).__name__}: {error}"
    raise RequestError(" ".join(message.split())[:_MAX_ERROR], param="messages", code="chat_template_error") from None
