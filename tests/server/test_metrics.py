"""What /metrics shows: right values, the names that the documents tell, and vLLM's names on request."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.live_server import LiveServer, live_server

from octavo.server.keys import Key, KeyRing
from octavo.server.ledger import Ledger
from octavo.server.metrics_alias import VLLM
from octavo.server.quotas import Accounts
from octavo.server.step_metrics import Counts

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
SECRET = "a-secret-of-alice"


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """With keys and aliases, so that every metric there is appears."""
    key = Key(name="alice", digest=hashlib.sha256(SECRET.encode()).digest(), tenant="")
    settings = {"accounts": Accounts(KeyRing([key]), Ledger(None)), "metrics_alias": "vllm"}
    with live_server(tmp_path_factory.mktemp("model"), settings=settings) as live:
        live.http.headers["Authorization"] = f"Bearer {SECRET}"
        live.complete(prompt="a prompt of some length", max_tokens=5, n=2)
        live.complete(prompt="b", max_tokens=1)
        assert live.post("/v1/completions", {"prompt": ""}).status_code == 400
        yield live


Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples(live: LiveServer) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(live.http.get(f"{live.url}/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def families(live: LiveServer) -> dict[str, str]:
    """Name as the documents have it (counters with _total) -> kind."""
    text = live.http.get(f"{live.url}/metrics").text
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))


def value(found: Samples, name: str, **labels: str) -> float:
    (match,) = [v for given, v in found[name] if labels.items() <= given.items()]
    return match


def test_documented_names_are_the_real_ones(observed: LiveServer) -> None:
    rows = re.findall(r"^\| `(octavo_\w+)(?:{[\w,]+})?` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.M)
    ours = {name: kind for name, kind in families(observed).items() if name.startswith("octavo_")}
    created = {name for name in ours if name.endswith("_created")}
    assert {name: kind for name, kind in ours.items() if name not in created} == dict(rows)


def test_documented_labels_are_the_real_ones(observed: LiveServer) -> None:
    found = samples(observed)
    for name, labels in re.findall(r"^\| `(octavo_\w+){([\w,]+)}`", (DOCS / "metrics.md").read_text(), re.M):
        assert all(set(given) == {*labels.split(","), "model_name"} for given, _ in found[name])


def test_every_name_in_the_dashboard_exists(observed: LiveServer) -> None:
    dashboard = json.loads((DOCS / "grafana" / "octavo.json").read_text())
    found = samples(observed)
    used: set[str] = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            names = set(re.findall(r"\bocta\w+", target["expr"]))
            assert names and names <= set(found), target["expr"]
            assert target["expr"].count("(") == target["expr"].count(")")
            for labels in re.findall(r"by \(([\w, ]+)\)", target["expr"]):
                (name,) = names
                assert set(labels.split(", ")) <= set(found[name][0][0])
            used |= names
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    ours = {n for n in families(observed) if n.startswith("octavo_") and not n.endswith("_created")}
    assert shown == ours, "the dashboard shows every metric"


def test_values(observed: LiveServer) -> None:
    found = samples(observed)
    assert value(found, "octavo_key_requests_total", key="alice") == 3
    assert value(found, "octavo_key_tokens_total", key="alice", kind="prompt") == 24
    assert value(found, "octavo_key_tokens_total", key="alice", kind="generation") == 11
    assert value(found, "octavo_http_responses_total", code="400") == 1
    assert value(found, "octavo_http_responses_total", code="200") >= 2
    assert value(found, "octavo_request_time_per_output_token_seconds_count") == 2
    assert value(found, "octavo_request_decode_time_seconds_count") == 3
    assert value(found, "octavo_request_prompt_tokens_sum") == 24
    assert value(found, "octavo_request_prompt_tokens_count") == 2
    assert value(found, "octavo_request_generation_tokens_sum") == 11
    assert value(found, "octavo_request_max_num_generation_tokens_sum") == 6
    steps = observed.engine.stats().num_steps
    for name in ("time_seconds", "sequences", "tokens"):
        assert value(found, f"octavo_step_{name}_count") == steps
    assert value(found, "octavo_step_sequences_sum") >= 10
    assert value(found, "octavo_step_tokens_sum") >= 23 + 1 + 8
    assert value(found, "octavo_engine_restarts_total") == 0


def test_tpot_is_the_mean_gap(tmp_path: Path) -> None:
    with live_server(tmp_path) as live:
        live.model.delay = 0.02
        live.complete(prompt="x", max_tokens=11)
        decode = live.metric("octavo_request_decode_time_seconds_sum")
        assert decode >= 0.2
        assert live.metric("octavo_request_time_per_output_token_seconds_sum") == pytest.approx(decode / 10)


def test_vllm_names(observed: LiveServer) -> None:
    """Each alias has exactly the values of its original, and the label engine."""
    kinds, found = families(observed), samples(observed)
    for ours, names in VLLM.items():
        (kind,) = {k for n, k in kinds.items() if n in (ours, f"{ours}_total")}
        for name in names:
            suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}[kind]
            for suffix in suffixes:
                assert [({**g, "engine": "0"}, v) for g, v in found[ours + suffix]] == found[name + suffix]
    assert value(found, "vllm:kv_cache_usage_perc") == 0
    assert value(found, "vllm:request_success_total", finished_reason="length") == 2


def test_no_aliases_unless_asked(live: LiveServer) -> None:
    assert "vllm" not in live.http.get(f"{live.url}/metrics").text


def test_counts() -> None:
    counts = Counts((1.0, 2.0, 4.0))
    for x in (0.5, 1.0, 1.5, 2.0, 5.0):
        counts.add(x)
    expected: dict[str, Any] = {"bounds": [1.0, 2.0, 4.0], "counts": [2, 2, 0, 1], "total": 10.0}
    assert counts.as_dict() == expected
