"""The tables of docs/api.md against the code: every field has a row, and each row is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import MODEL, LiveServer

from octavo.server.openapi import OPERATIONS

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
# A value that a refusal must meet, and one that must pass although the field is refused in general.
REFUSED: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "audio": {"voice": "alloy"},
    "background": True,
    "background_options": {"a": 1},
    "container": "c",
    "context_management": {"edits": [1]},
    "conversation": "conv_1",
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "dimensions": 3,
    "image": {"a": 1},
    "mcp_servers": [{"url": "x"}],
    "modalities": ["audio"],
    "moderation": {"a": 1},
    "prediction": {"type": "content"},
    "previous_response_id": "resp_1",
    "prompt": {"id": "p"},
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "store": True,
    "suffix": "x",
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "truncation": "auto",
    "verbosity": "low",
    "web_search_options": {"a": 1},
}
PASSING: dict[str, Any] = {
    "background": False,
    "dimensions": 4,
    "function_call": "auto",
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "store": False,
    "text": {"format": {"type": "text"}},
    "thinking": {"type": "disabled"},
    "truncation": "disabled",
}
NO_EFFECT: dict[str, Any] = {
    "cache_control": {"type": "ephemeral"},
    "diagnostics": {},
    "inference_geo": "eu",
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "auto",
    "speed": "fast",
    "stream_options": {"include_obfuscation": False},
    "user": "u",
    "user_profile_id": "u",
    "workspace_id": "w",
}


def ask(live: LiveServer, path: str, body: dict[str, Any]) -> httpx.Response:
    greedy = {} if path == "/v1/embeddings" else {"temperature": 0}
    return live.http.post(f"{live.url}{path}", json={"model": MODEL, **greedy, **body})


def tables() -> dict[str, dict[str, str]]:
    """{path: {field: status}} of the section Conformance."""
    text = DOCS.read_text(encoding="utf-8").partition("\n## Conformance\n")[2]
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"\n### (?:POST|GET) ", text)[1:]:
        path = part.splitlines()[0]
        rows = re.findall(r"^\| `(\w+)` \| [\w]+ \| ([\w ]+?) \|", part, re.MULTILINE)
        assert len(rows) == len(dict(rows)), f"a field of {path} has two rows"
        found[path] = dict(rows)
    return found


TABLES = tables()


def rows_of(status: str) -> list[tuple[str, str]]:
    return [(path, name) for path, table in TABLES.items() for name, given in table.items() if given == status]


def test_every_field_has_a_row() -> None:
    assert {*MINIMAL} <= {*TABLES}
    for path, table in TABLES.items():
        body = next(op.body for op in OPERATIONS if op.path == path)
        assert body is not None
        assert sorted(table) == sorted(body.__struct_fields__), path
        assert {*table.values()} <= {"supported", "no effect", "refused"}


@pytest.mark.parametrize(("path", "name"), rows_of("refused"))
def test_refused(live: LiveServer, path: str, name: str) -> None:
    response = ask(live, path, {**MINIMAL[path], name: REFUSED[name]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if path == "/v1/messages":
        assert name in error["message"]
    else:
        assert error["code"] == "unsupported_field" and error["param"].split(".")[0] == name
    if name in PASSING and path != "/v1/messages":
        assert ask(live, path, {**MINIMAL[path], name: PASSING[name]}).status_code == 200


@pytest.mark.parametrize(("path", "name"), rows_of("no effect"))
def test_no_effect(live: LiveServer, path: str, name: str) -> None:
    value = NO_EFFECT[name]
    body = {**MINIMAL[path], "stream": True} if name == "stream_options" else MINIMAL[path]
    plain, given = ask(live, path, body), ask(live, path, {**body, name: value})
    assert plain.status_code == given.status_code == 200, given.text
    if name != "stream_options":
        for key in ("choices", "output", "content", "data"):
            plain_part, given_part = plain.json().get(key), given.json().get(key)
            assert re.sub(r"_[0-9a-f]{32}", "", str(plain_part)) == re.sub(r"_[0-9a-f]{32}", "", str(given_part))
