"""Wishes as grammars: what is allowed, byte for byte, and what is refused before it costs anything (C124 to C134)."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.live_server import write_tokenizer

from octavo.constraint import StructuredOutputsParams
from octavo.errors import RequestError
from octavo.text.constraints import ConstraintCompiler
from octavo.text.tokenizer import Tokenizer

PIECES = ('"},', '":"', '{"', '": ', "}}", "ab", "猫", "ñ", "  ", "\n ", '"a"', "true", "123")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """All bytes, and tokens that cross the borders of JSON and of characters."""
    return Tokenizer.from_directory(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), pieces=PIECES))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(lambda: tokenizer, tokenizer.vocab_size + 45)  # logits beyond the vocabulary


def wish(kind: str, value: Any, **more: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**{kind: value, **more})


def allowed(mask: bytes) -> set[int]:
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


def says(compiler: ConstraintCompiler, wanted: StructuredOutputsParams, text: str | bytes) -> str:
    """How far a text of single bytes gets: "no", "open", "may end" or "complete"."""
    constraint = compiler.compile(wanted).start()
    eos = min(compiler._make_tokenizer().eos_token_ids)
    complete = False
    for byte in text.encode() if isinstance(text, str) else text:
        if complete or byte not in allowed(constraint.mask()):
            return "no"
        complete = constraint.accept(byte)
    if complete:
        return "complete"
    return "may end" if eos in allowed(constraint.mask()) else "open"


def sample(compiler: ConstraintCompiler, wanted: StructuredOutputsParams, seed: int, limit: int = 3000) -> str:
    """A random walk through the masks, ended as soon as it may end after some tokens; the text."""
    tokenizer, rng = compiler._make_tokenizer(), random.Random(seed)
    constraint = compiler.compile(wanted).start()
    ids: list[int] = []
    while len(ids) < limit:
        choices = allowed(constraint.mask())
        ending = choices & tokenizer.eos_token_ids
        closing = {i for i in choices if (b := tokenizer.token_bytes(i)) and not b.strip(b'"}]')}
        if ending and len(ids) > 20:
            break
        token_id = rng.choice(sorted(closing if closing and len(ids) > 40 else choices - ending or ending))
        if token_id in tokenizer.eos_token_ids:
            break
        ids.append(token_id)
        if constraint.accept(token_id):
            break
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_kinds(compiler: ConstraintCompiler) -> None:
    assert says(compiler, wish("choice", ["yes", "no", "yes please"]), "yes") == "may end"
    assert says(compiler, wish("choice", ["yes", "no", 'say "ñ"\n\x01']), 'say "ñ"\n\x01') == "complete"
    assert says(compiler, wish("choice", ["yes", "no"]), "maybe") == "no"
    assert says(compiler, wish("regex", r"^\d{3}-[a-c]+/$"), "123-abc/") == "complete"
    assert says(compiler, wish("regex", "a\nb"), "a\nb") == "complete"
    assert says(compiler, wish("regex", ".*"), "a\n") == "no"
    assert says(compiler, wish("grammar", 'start: "a" b+\nb: "b" | NUM\nNUM: /[0-9]/'), "ab7") == "may end"
    assert says(compiler, wish("grammar", 'root ::= "a" root | "b"'), "aab") == "complete"
    assert says(compiler, wish("json_object", True), '{"a": [1, {"b": null}]}') == "complete"
    for text in ("[1]", '"a"', "```json\n{}", " {}", "{} "):
        assert says(compiler, wish("json_object", True), text) == "no"


def test_whitespace_is_bounded(compiler: ConstraintCompiler) -> None:
    """C130: at most one blank, or one line break and its indentation, between two tokens of JSON."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    closed = {**schema, "additionalProperties": False}
    for text in ('{"a":1}', '{ "a" : 1 }', '{\n    "a": 1\n}'):
        assert says(compiler, wish("json", closed), text) == "complete"
    for text in ('{  "a', '{\n\n"a', '{"a": \n1', "{\n" + " " * 21):
        assert says(compiler, wish("json", closed), text) == "no"
    tight = wish("json", closed, disable_any_whitespace=True)
    assert says(compiler, tight, '{"a":1}') == "complete" and says(compiler, tight, '{"a": ') == "no"
    custom = wish("json", closed, whitespace_pattern=" {0,3}")
    assert says(compiler, custom, '{   "a":1}') == "complete" and says(compiler, custom, "{\n") == "no"


def test_additional_properties(compiler: ConstraintCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"format": {"type": "null"}}}}}
    assert says(compiler, wish("json", schema), '{"b":1}') == "complete"
    closed = wish("json", schema, disable_additional_properties=True)
    assert says(compiler, closed, '{"b') == "no" and says(compiler, closed, '{"a":{"b') == "no"
    assert says(compiler, closed, '{"a":{"format":null}}') == "complete"


NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["value", "children"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "boolean"}}, "required": ["v"]},
        {"type": "array", "items": [{"type": "integer"}], "prefixItems": [{"type": "null"}], "minItems": 1}
        | {"items": {"$ref": "#/prefixItems/0"}},
    ],
)
def test_references(compiler: ConstraintCompiler, schema: dict[str, Any]) -> None:
    """C124: recursive definitions, the root, and a place inside an array."""
    jsonschema = pytest.importorskip("jsonschema")
    for seed in range(5):
        jsonschema.validate(json.loads(sample(compiler, wish("json", schema), seed)), schema)


def chain(length: int, link: Any) -> dict[str, Any]:
    defs = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$defs": {**defs, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def deep(levels: int) -> str:
    return '{"type":"array","items":' * levels + '{"type":"null"}' + "}" * levels


REFUSED: dict[str, Any] = {
    "cycle without base": {"$ref": "#"},
    "required cycle": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "cycle of two": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "array cycle": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "missing": {"$ref": "#/$defs/no"},
    "external": {"$ref": "http://127.0.0.1:1/schema.json"},
    "external file": {"$ref": "file:///etc/passwd"},
    "no schema": {"$ref": "#/title", "title": "x"},
    "anchor": {"$ref": "#there"},
    "bad type": {"type": "strin"},
    "bad regex": {"type": "string", "pattern": "["},
    "unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 2},
    "empty enum": {"enum": []},
    "false": False,
    "list": [],
    "not": {"not": {"type": "string"}},
    "odd schema": {"properties": {"a": 3}},
    "deep": deep(60),
    "very deep": deep(100_000),
    "long chain": chain(2000, lambda ref: {"$ref": ref}),
    "long chain of arrays": chain(170, lambda ref: {"type": "array", "items": {"$ref": ref}}),
    "many properties": {"properties": {f"p{i}": {} for i in range(1001)}},
    "many values": {"enum": list(range(5001))},
    "deep value": '{"const":' + "[" * 120 + "]" * 120 + "}",
    "big multiple": {"type": "integer", "multipleOf": 999_983},
    "common multiple": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},
    "not JSON": "{",
    "long chain of pairs": chain(400, lambda ref: {"allOf": [{"$ref": ref}] * 2}),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_schemas(compiler: ConstraintCompiler, name: str) -> None:
    """C124, C128: one bounded error, quickly, without a look outside."""
    schema = REFUSED[name]
    with pytest.raises(RequestError) as e:
        compiler.compile(wish("json", schema if isinstance(schema, dict | str | bool) else json.dumps(schema)))
    assert e.value.param == "structured_outputs" and 10 < len(e.value.message) < 500
    assert "\n" not in e.value.message


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "["),
        ("regex", "(?=a)b"),
        ("regex", "(" * 50_000 + "a" + ")" * 50_000),
        ("grammar", "start: nope"),
        ("grammar", "start: start"),
        ("grammar", "strt: 'a'"),
        ("grammar", ""),
        ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        ("grammar", "start: A0\n" + "\n".join(f"A{i}: A{i + 1}" for i in range(10_000)) + '\nA10000: "x"'),
        ("grammar", 'start: %json {"type":"strin"}'),
        ("grammar", "start: %json " + json.dumps(chain(2000, lambda ref: {"allOf": [{"$ref": ref}]}))),
        ("grammar", "start: %json nonsense"),
        ("grammar", "root ::= ((("),
        ("grammar", '{"grammars": []}'),
    ],
)
def test_refused_texts(compiler: ConstraintCompiler, kind: str, text: str) -> None:
    with pytest.raises(RequestError) as e:
        compiler.compile(wish(kind, text))
    assert e.value.param == "structured_outputs" and 10 < len(e.value.message) < 500


def test_errors_say_what_is_wrong(compiler: ConstraintCompiler) -> None:
    for wanted, words in (
        (wish("json", {"type": "strin"}), "the JSON schema cannot be used: Invalid type: strin"),
        (wish("json", {"not": {}}), 'the JSON schema cannot be used: Unimplemented keys: ["not"]'),
        (wish("regex", "["), 'the regex cannot be used: invalid regex "[" (in regex): regex parse error:'),
        (wish("grammar", "start: nope"), 'the grammar cannot be used: unknown name: "nope"'),
    ):
        with pytest.raises(RequestError) as e:
            compiler.compile(wanted)
        assert e.value.message.startswith(words)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["cat", "Dog"]},
        {"$defs": {"pet": {"enum": ["cat", "Dog"]}}, "$ref": "#/$defs/pet"},
        {"enum": ["猫", "ñandú", "🐢"]},
        {"enum": [1, "a", None, True]},
        {"const": {"a": [1, "x"]}},
    ],
)
def test_enums(compiler: ConstraintCompiler, schema: dict[str, Any]) -> None:
    """C125: the value is one of those listed, non-ASCII ones are written raw."""
    values = schema.get("enum") or schema.get("$defs", {}).get("pet", {}).get("enum") or [schema.get("const")]
    for seed in range(20):
        text = sample(compiler, wish("json", schema), seed)
        assert json.loads(text) in values and "\\u" not in text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^[०-९]{3}$", ["०१२"], ["012", "०१"]),  # noqa: RUF001
        ("^[^a]$", ["b", "猫", "\n"], ["a", "bb"]),
        (r"^\p{L}+$", ["Ñandú", "猫"], ["1", ""]),
        (r"[\u0021-\u2000]+", ["ab"], []),
    ],
)
def test_patterns_go_by_code_points(
    compiler: ConstraintCompiler, pattern: str, good: list[str], bad: list[str]
) -> None:
    """C127."""
    wanted = wish("json", {"type": "string", "pattern": pattern})
    for value in good:
        assert says(compiler, wanted, json.dumps(value, ensure_ascii=False)) == "complete"
    for value in bad:
        assert says(compiler, wanted, json.dumps(value, ensure_ascii=False)) == "no"
    # RFC 8259: no raw control characters, whatever the pattern.
    assert says(compiler, wanted, '"\n') == "no" and says(compiler, wanted, '"\x00') == "no"


def test_mask_is_all_that_keeps_the_text_possible(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> None:
    """C134: allowed are the tokens whose bytes lead on, also across borders and inside characters."""
    schema = {"type": "object", "properties": {"a": {"enum": ["猫", "ab", "x"]}, "b": {"type": "boolean"}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    wanted = wish("json", schema, disable_any_whitespace=True)
    texts = [f'{{"a":"{v}","b":{b}}}'.encode() for v in ("猫", "ab", "x") for b in ("true", "false")]
    for text in texts:
        for cut in range(len(text)):
            constraint = compiler.compile(wanted).start()
            for byte in text[:cut]:
                assert not constraint.accept(byte)
            possible = {t[cut:] for t in texts if t.startswith(text[:cut])}
            want = {
                i
                for i in range(tokenizer.vocab_size)
                if not tokenizer.is_special(i)
                and (b := tokenizer.token_bytes(i))
                and any(p.startswith(b) for p in possible)
            }
            assert allowed(constraint.mask()) == want, text[:cut]


def test_descriptions_change_nothing(compiler: ConstraintCompiler) -> None:
    """C134: nor do titles, defaults, examples and formats that nobody knows."""
    plain = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    told = {"type": "object", "title": 'say "x"\n', "description": '{"}]', "additionalProperties": False,
            "properties": {"a": {"type": "string", "description": "猫 %json {", "format": "password", "examples": [1]}},
            "default": {"format": "nope"}, "$schema": "https://json-schema.org/draft/2020-12/schema"}  # fmt: skip
    for text in (b"", b"{", b'{"a', b'{"a":"', b'{"a":"x"', b'{"a":"\xe7'):
        masks = []
        for schema in (plain, told):
            constraint = compiler.compile(wish("json", schema)).start()
            for byte in text:
                constraint.accept(byte)
            masks.append(constraint.mask())
        assert masks[0] == masks[1]


def test_starts_are_independent_and_the_cache_is_bounded(compiler: ConstraintCompiler) -> None:
    grammar = compiler.compile(wish("choice", ["ab", "cd"]))
    first, second = grammar.start(), grammar.start()
    assert not first.accept(ord("a"))
    assert ord("c") in allowed(second.mask()) and allowed(first.mask()) == {ord("b")}
    assert compiler.compile(wish("choice", ["ab", "cd"])) is grammar
    for i in range(80):
        compiler.compile(wish("choice", [f"x{i}"]))
    assert len(compiler._cache) == 64 and compiler.compile(wish("choice", ["ab", "cd"])) is not grammar


def test_a_fault_empties_the_mask(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(wish("choice", ["ab"])).start()
    assert not constraint.accept(ord("z"))
    assert not any(constraint.mask()) and len(constraint.mask()) == len(
        compiler.compile(wish("choice", ["ab"])).start().mask()
    )
    assert not constraint.accept(ord("b"))


def test_json_object_by_random_walks(compiler: ConstraintCompiler) -> None:
    """C133."""
    for seed in range(20):
        assert isinstance(json.loads(sample(compiler, wish("json_object", True), seed)), dict)


def test_regexes_by_random_walks(compiler: ConstraintCompiler) -> None:
    for regex in (r"[a-z]{2,5}@[a-z]+\.(com|org)", r"(ab|c)*d?", r"\d{4}-\d{2}"):
        for seed in range(5):
            assert re.fullmatch(regex, sample(compiler, wish("regex", regex), seed))


def test_own_vocabulary(tmp_path: Path) -> None:
    """Without end-of-text token a complete text still ends, and the mask has the model's width."""
    directory = write_tokenizer(tmp_path, eos=None)
    tokenizer = Tokenizer.from_directory(directory)
    compiler = ConstraintCompiler(lambda: tokenizer, tokenizer.vocab_size)
    constraint = compiler.compile(wish("choice", ["ab", "abc"])).start()
    assert len(constraint.mask()) == -(-tokenizer.vocab_size // 32) * 4
    assert not constraint.accept(ord("a")) and not constraint.accept(ord("b")) and constraint.accept(ord("c"))
