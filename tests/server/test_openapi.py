"""/openapi.json says what the server does: its routes, its limits, and whatever schemathesis makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support.live_server import MODEL, LiveServer, live_server

from octavo.server.openapi import LIMITS, OPERATIONS, describe

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

# schemathesis draws from it in its strategies; ours is derandomised all the same.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
HIDDEN = {"/openapi.json", "/docs"}


def test_every_route_is_described(live: LiveServer) -> None:
    routes = {(r.path.replace(":path", ""), m.lower()) for r in live.server.config.app.routes for m in r.methods}  # type: ignore[union-attr]
    described = {(path, method) for path, methods in describe()["paths"].items() for method in methods}
    assert {(path, m) for path, m in routes if path not in HIDDEN and m != "head"} == described


def _cases() -> Iterator[tuple[str, str, float, bool]]:
    for path, minimal in MINIMAL.items():
        body = next(op.body for op in OPERATIONS if op.path == path)
        assert body is not None
        for name in {*LIMITS} & {*body.__struct_fields__} - {*minimal}:
            for limit, step in zip(LIMITS[name], (-1, 1), strict=True):
                if limit is not None:
                    yield path, name, limit, True
                    yield path, name, limit + step, False


@pytest.mark.parametrize(("path", "name", "value", "fine"), sorted(_cases()))
def test_limits_are_the_servers(live: LiveServer, path: str, name: str, value: float, fine: bool) -> None:
    body = {**MINIMAL[path], name: value}
    if name == "top_logprobs" and path.endswith("chat/completions"):
        body["logprobs"] = True
    response = live.post(path, body)
    assert response.status_code == (200 if fine else 400), response.text
    if not fine and path != "/v1/messages":
        assert response.json()["error"]["param"] == name


def test_required_fields_and_keys() -> None:
    document = describe(with_key=True)
    assert document["components"]["schemas"]["MessagesBody"]["required"] == ["model", "messages", "max_tokens"]
    assert document["security"] == [{"bearer": []}, {"header": []}]
    assert "security" not in describe()
    assert document["components"]["schemas"]["ChatBody"]["additionalProperties"] is False
    assert "additionalProperties" not in describe(lenient=True)["components"]["schemas"]["ChatBody"]


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    with live_server(tmp_path, settings={"api_key": "secret"}) as live:
        page = live.http.get(f"{live.url}/docs")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "http://" not in page.text and "https://" not in page.text and "src=" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert live.http.get(f"{live.url}/openapi.json").json() == describe(with_key=True)


# ---------------------------------------------------------------------------- schemathesis

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


SETTINGS = hypothesis.settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.generate],
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def operation(live: LiveServer, path: str) -> Any:
    schema = schemathesis.openapi.from_dict(describe())
    schema.config.update(base_url=live.url)
    return next(o.ok() for o in schema.get_all_operations() if o.ok().path == path)


# Fields whose values are right whatever the others are.
PLAIN_FIELDS = {*LIMITS, "stream", "ignore_eos", "echo", "skip_special_tokens", "user", "metadata"} - {"top_logprobs"}


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", [op.path for op in OPERATIONS if op.body is not None])
def test_schemathesis(shared_server: LiveServer, path: str, mode: Any) -> None:
    """Bodies of all sorts: never a 5xx, every answer as described, wrong types refused, right numbers taken."""

    @SETTINGS
    @hypothesis.given(case=operation(shared_server, path).as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL  # any other is a 404 and tests nothing
        case.validate_response(case.call(), checks=CHECKS)
        if mode is schemathesis.GenerationMode.POSITIVE and path in MINIMAL:
            # To JSON Schema 1.0 is an integer too, here it is not.
            plain = {
                k: int(v) if isinstance(v, float) and v.is_integer() else v
                for k, v in case.body.items()
                if k in PLAIN_FIELDS
            }
            case.body = plain | MINIMAL[path] | {"model": MODEL}
            response = case.call()
            assert response.status_code == 200, response.text
            case.validate_response(response, checks=CHECKS)

    run()


@pytest.mark.parametrize("path", [op.path for op in OPERATIONS if op.body is None])
def test_schemathesis_without_body(shared_server: LiveServer, path: str) -> None:
    @SETTINGS
    @hypothesis.given(case=operation(shared_server, path).as_strategy())
    def run(case: Any) -> None:
        case.validate_response(case.call(), checks=CHECKS)

    run()
