"""Explanations over HTTP: in the answer, in the last chunk, by X-Request-Id, in the log, in the metrics."""

import asyncio
import json
import logging

import pytest
from support.live_server import live_server

from octavo.server.explained import Entry, RequestBook, log_line
from octavo.server.failures import RequestUnknownError

LONG = "x" * 40  # 40 tokens: two full blocks before the last one


@pytest.fixture
def live(tmp_path):
    """A server of its own for each test: what others asked would be hit."""
    with live_server(tmp_path) as server:
        yield server


def check_ttft(prompt):
    ttft = prompt["ttft"]
    assert ttft["total_seconds"] > 0
    parts = ttft["queue_seconds"] + ttft["prefill_seconds"] + ttft["rest_seconds"]
    assert parts == pytest.approx(ttft["total_seconds"], abs=1e-3)


def test_answers_say_nothing_unless_asked(live):
    assert "octavo" not in live.complete(prompt=LONG, max_tokens=2)
    assert all("octavo" not in f for f in live.stream("/v1/completions", {"prompt": LONG, "max_tokens": 2}))


def test_explain_in_a_completion(live):
    cold = live.complete(prompt=LONG, max_tokens=3, explain=True)
    warm = live.complete(prompt=LONG, max_tokens=3, explain=True)
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"]
    told = cold["octavo"]["prompts"][0]
    check_ttft(told)
    sample = told["engine"]["samples"][0]
    assert (sample["hit_tokens"], sample["miss_reason"], sample["chunks"]) == (0, "never_seen", [40])
    assert (sample["generated_tokens"], sample["finish_reason"]) == (3, "length")
    sample = warm["octavo"]["prompts"][0]["engine"]["samples"][0]
    assert sample["hit_tokens"] == warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    assert sample["miss_reason"] is None


def test_explain_in_chat_with_a_stop_string(live):
    """The engine hears of the stop after its last event; the explanation knows it all the same."""
    messages = live.chat_script("hi", ["Hello", "END", "Paris"])
    live.model.delay = 0.02  # else the engine is far ahead before it hears of the stop
    answer = live.post("/v1/chat/completions", {"messages": messages, "stop": "END", "explain": True}).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"
    engine = answer["octavo"]["prompts"][0]["engine"]
    assert engine["status"] == "finished"
    assert engine["samples"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_explain_in_the_last_chunk(live, route, usage):
    what = {"prompt": "a"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    options = {"stream_options": {"include_usage": True}} if usage else {}
    frames = live.stream(route, {**what, **options, "max_tokens": 3, "explain": True})
    assert all("octavo" not in f for f in frames[:-1])
    assert frames[-1]["choices"] == []
    assert ("usage" in frames[-1]) is usage
    check_ttft(frames[-1]["octavo"]["prompts"][0])
    assert frames[-1]["octavo"]["prompts"][0]["engine"]["samples"][0]["generated_tokens"] == 3


def test_one_explanation_per_prompt(live):
    answer = live.complete(prompt=["a", "bb"], n=2, max_tokens=2, temperature=1, seed=1, explain=True)
    prompts = answer["octavo"]["prompts"]
    assert [p["engine"]["num_prompt_tokens"] for p in prompts] == [1, 2]
    assert [len(p["engine"]["samples"]) for p in prompts] == [2, 2]


def test_explain_must_be_a_bool(live):
    response = live.post("/v1/completions", {"prompt": "a", "explain": "yes"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "explain")


# ---------------------------------------------------------------- by id


def get(live, name):
    return live.http.get(f"{live.url}/v1/requests/{name}")


def test_by_x_request_id(live):
    response = live.post("/v1/completions", {"prompt": LONG, "max_tokens": 3}, **{"X-Request-Id": "team/a:42"})
    assert response.headers["x-request-id"] == "team/a:42"
    told = get(live, "team/a:42").json()
    assert (told["object"], told["id"], told["route"]) == ("request", "team/a:42", "/v1/completions")
    assert (told["status"], told["num_prompt_tokens"], told["num_generated_tokens"]) == ("finished", 40, 3)
    assert told["finish_reasons"] == ["length"]
    check_ttft(told["prompts"][0])


def test_by_an_id_of_our_own(live):
    response = live.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert get(live, response.headers["x-request-id"]).json()["status"] == "finished"


def test_of_two_with_one_id_the_latest(live):
    for n in (1, 2):
        live.post("/v1/completions", {"prompt": "a", "max_tokens": n}, **{"X-Request-Id": "same"})
    assert get(live, "same").json()["num_generated_tokens"] == 2


def test_a_live_request(live):
    live.model.gate.clear()
    sock = live.send_raw("/v1/completions", {"prompt": "a", "max_tokens": 5})
    try:
        live.wait_until(lambda: live.client.num_open == 1)
        told = live.server._state.book._entries
        live.wait_until(lambda: len(told) == 1)
        name = next(iter(told))
        # The engine waits in a step, so it answers only when that is over.
        live.model.gate.set()
        told = get(live, name).json()
        assert told["status"] in ("live", "finished")
        live.wait_until(lambda: get(live, name).json()["status"] == "finished")
    finally:
        sock.close()


def test_a_client_that_left(live):
    live.model.delay = 0.02
    sock = live.send_raw("/v1/completions", {"prompt": "a", "max_tokens": 200, "stream": True})
    assert sock.recv(10)
    sock.close()
    live.wait_until(lambda: live.idle)
    (name,) = live.server._state.book._entries
    live.wait_until(lambda: get(live, name).json()["status"] == "aborted")
    assert get(live, name).json()["prompts"][0]["engine"]["samples"][0]["finish_reason"] == "abort"


def test_a_refused_request(live):
    response = live.post("/v1/completions", {"prompt": "x" * 300})
    assert response.status_code == 400
    told = get(live, response.headers["x-request-id"]).json()
    assert (told["status"], told["prompts"]) == ("refused", [{"ttft": None, "engine": None}])


@pytest.mark.parametrize("name", ["nobody", "a/b", "x" * 5000])
def test_unknown(live, name):
    response = get(live, name)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")
    assert len(response.content) < 500


class FakeGeneration:
    def __init__(self, tenant):
        self.tenant, self.engine_ids, self.prompts, self.choices = tenant, (), [], []
        self.status, self.elapsed = "finished", 0.5


class FakeClient:
    async def explain(self, request_ids):
        return []


def test_only_ones_own_and_only_so_many():
    book = RequestBook(FakeClient(), capacity=3)
    for i in range(5):
        book.open(Entry(f"r{i}", "/v1/completions", FakeGeneration("a")))
    assert len(book) == 3
    assert asyncio.run(book.describe("r4", "a"))["id"] == "r4"
    for name, tenant in (("r0", "a"), ("r4", "b"), ("r4", "")):
        with pytest.raises(RequestUnknownError):
            asyncio.run(book.describe(name, tenant))


def test_a_closed_entry_keeps_no_text(live):
    live.complete(prompt=LONG, max_tokens=2)
    live.wait_until(lambda: all(e._generation is None for e in live.server._state.book._entries.values()))


# ---------------------------------------------------------------- log and metrics


def test_log(live, caplog):
    with caplog.at_level(logging.INFO, logger="octavo.requests"):
        live.post("/v1/completions", {"prompt": LONG, "max_tokens": 3}, **{"X-Request-Id": "find-me"})
        live.wait_until(lambda: "find-me" in caplog.text)
    (record,) = [r for r in caplog.records if r.name == "octavo.requests"]
    line = record.getMessage()
    assert line.startswith("request find-me: /v1/completions finished seconds=")
    for fact in ("prompt_tokens=40", "generated_tokens=3", "finish=length", "hit=0", "miss=never_seen", "chunks=1"):
        assert fact in line
    assert "total_s=" in line and "queue_s=" in line and "rest_s=" in line
    assert "\n" not in line


def test_nothing_is_logged_by_default(live, caplog):
    live.complete(prompt=LONG)
    assert not [r for r in caplog.records if r.name == "octavo.requests"]


def test_log_lines_are_bounded():
    told = {
        "route": "/v1/completions", "status": "finished", "seconds": 1.0, "num_prompt_tokens": 1,
        "num_generated_tokens": 1, "finish_reasons": ["stop"] * 1000,
        "prompts": [{"ttft": None, "engine": None}] * 1000,
    }  # fmt: skip
    assert len(log_line(told)) < 300


def test_metrics_from_the_same_events(live):
    live.complete(prompt=LONG, max_tokens=2)
    live.complete(prompt=LONG, max_tokens=2)
    assert live.metric('octavo_prefix_cache_admissions_total{model_name="org/tiny:v1.0",reason="never_seen"') == 1
    assert live.metric('octavo_prefix_cache_admissions_total{model_name="org/tiny:v1.0",reason="none"') == 1
    assert live.metric("octavo_request_queue_time_seconds_count") == 2
    assert live.metric("octavo_request_prefill_time_seconds_count") == 2
    assert live.metric('octavo_request_prefill_time_seconds_bucket{le="+Inf"') == 2
    assert live.metric('octavo_wait_seconds_total{model_name="org/tiny:v1.0",reason="blocks"') == 0
    assert live.metric("octavo_preempted_tokens_total") == 0
    json.dumps(live.http.get(f"{live.url}/metrics").text)


def test_switched_off(tmp_path):
    with live_server(tmp_path, settings={"explain": False}) as live:
        response = live.post("/v1/completions", {"prompt": "a", "explain": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "explain")
        response = live.post("/v1/completions", {"prompt": "a"})
        assert get(live, response.headers["x-request-id"]).status_code == 404
