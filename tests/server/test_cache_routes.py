"""GET /v1/cache, pins by request field and by endpoint, and who may see and delete them."""

import hashlib

import pytest
from support.live_server import MODEL, live_server

from octavo.server.keys import Key, KeyRing
from octavo.server.ledger import Ledger
from octavo.server.quotas import Accounts

PROMPT = "p" * 40  # 40 tokens: two full blocks


@pytest.fixture
def live(tmp_path):
    with live_server(tmp_path) as server:
        yield server
        for pin in cache(server)["pins"]:
            server.http.delete(f"{server.url}/v1/cache/pins/{pin['id']}")
        server.wait_until(lambda: server.idle)


def cache(live, query="", **headers):
    response = live.http.get(f"{live.url}/v1/cache{query}", headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def pin(live, headers=None, **body):
    return live.http.post(
        f"{live.url}/v1/cache/pins", json={"model": MODEL, "ttl_seconds": 60, **body}, headers=headers or {}
    )


def test_trees(live):
    live.complete(prompt=PROMPT, max_tokens=3)
    live.complete(prompt=PROMPT, max_tokens=3)
    report = cache(live)
    assert (report["object"], report["block_size"], report["num_blocks"]) == ("cache", 16, 512)
    (tree,) = report["trees"]
    # 40 prompt tokens and the KV of two answer tokens (the last one has none).
    assert (tree["longest_tokens"], tree["owners"]) == (42, [""])
    assert tree["hits"] >= 2
    assert tree["num_blocks_in_use"] == 0
    assert tree["age_seconds"] >= tree["idle_seconds"] >= 0


def test_limit(live):
    for i in range(5):
        live.complete(prompt=f"{i}" * 20, max_tokens=1)
    report = cache(live, "?limit=2")
    assert (report["num_trees"], len(report["trees"])) == (5, 2)
    assert cache(live, "?limit=0")["trees"] == []
    for bad in ("x", "-1", "1.5", "99999", "1" * 50):
        response = live.http.get(f"{live.url}/v1/cache", params={"limit": bad})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_pin_by_request_field(live, route, stream):
    what = {"prompt": PROMPT} if route == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    response = live.post(route, {**what, "max_tokens": 2, "cache_pin": 60, "stream": stream})
    assert response.status_code == 200
    (pinned,) = cache(live)["pins"]
    assert pinned["num_tokens"] % 16 == 0 and pinned["num_tokens"] >= 32
    assert 50 < pinned["expires_in_seconds"] <= 60


@pytest.mark.parametrize(
    ("value", "prompt"), [(0, PROMPT), (-5, PROMPT), (1e12, PROMPT), ("long", PROMPT), (True, PROMPT), (60, "short")]
)
def test_pins_that_cannot_be(live, value, prompt):
    response = live.post("/v1/completions", {"prompt": prompt, "cache_pin": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_pin")
    assert cache(live)["pins"] == []


def test_pin_by_endpoint(live):
    made = pin(live, prompt=PROMPT)
    assert made.status_code == 200, made.text
    told = made.json()
    assert (told["object"], told["num_tokens"], told["owner"]) == ("cache.pin", 32, "")
    assert [p["id"] for p in cache(live)["pins"]] == [told["id"]]
    answer = live.complete(prompt=PROMPT, max_tokens=2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    deleted = live.http.delete(f"{live.url}/v1/cache/pins/{told['id']}")
    assert deleted.json() == {"object": "cache.pin", "id": told["id"], "deleted": True}
    assert cache(live)["pins"] == []
    again = live.http.delete(f"{live.url}/v1/cache/pins/{told['id']}")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "pin_not_found")


def test_pin_the_beginning_of_conversations(live):
    """A system message: what every chat with it begins with."""
    system = {"role": "system", "content": "s" * 50}
    told = pin(live, messages=[system]).json()
    response = live.post(
        "/v1/chat/completions", {"messages": [system, {"role": "user", "content": "hi"}], "max_tokens": 1}
    )
    cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= told["num_tokens"] >= 48


def test_pinning_again_renews(live):
    first = pin(live, prompt=PROMPT, ttl_seconds=10).json()
    second = pin(live, prompt=PROMPT, ttl_seconds=100).json()
    assert first["id"] == second["id"]
    assert second["expires_in_seconds"] > 90
    assert len(cache(live)["pins"]) == 1


def test_a_salt_has_its_own_pins(live):
    ids = {pin(live, prompt=PROMPT, cache_salt=salt).json()["id"] for salt in ("a", "b", "")}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": PROMPT, "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": PROMPT, "ttl_seconds": None}, "ttl_seconds"),
        ({"prompt": PROMPT, "ttl_seconds": 0}, "ttl_seconds"),
        ({"prompt": PROMPT, "ttl_seconds": "1"}, "ttl_seconds"),
        ({"prompt": "short"}, "prompt"),
        ({"prompt": [999_999] * 40}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": PROMPT, "cache_salt": "x" * 300}, "cache_salt"),
        ({"prompt": PROMPT, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": PROMPT, "pin": 1}, "pin"),
        ({"prompt": PROMPT, "model": "other"}, "model"),
    ],
)
def test_bad_pins(live, body, param):
    response = pin(live, **body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
    assert cache(live)["pins"] == []


def test_the_limit_of_pins(tmp_path):
    with live_server(tmp_path, num_blocks=16, cache_pin_limit=0.25) as live:
        assert pin(live, prompt="a" * 50).status_code == 200
        response = pin(live, prompt="b" * 50)
        assert (response.status_code, response.json()["error"]["code"]) == (409, "pin_limit")
        response = pin(live, prompt="c" * 100)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        # Pins yield to a prompt that needs the whole pool.
        assert live.complete(prompt="d" * 250, max_tokens=2)["usage"]["completion_tokens"] == 2
        assert cache(live)["pins"] == []


# ---------------------------------------------------------------- tenants


def bearer(name):
    return {"Authorization": f"Bearer {name}-secret"}


def test_everyone_sees_and_deletes_only_their_own(tmp_path):
    keys = [Key(name=n, digest=hashlib.sha256(f"{n}-secret".encode()).digest(), tenant=t) for n, t in
            (("ann", "red"), ("bob", "red"), ("cat", "blue"))]  # fmt: skip
    settings = {"accounts": Accounts(KeyRing(keys), Ledger(None)), "salt_secret": b"s" * 32}
    with live_server(tmp_path, settings=settings) as live:
        made = pin(live, bearer("ann"), prompt=PROMPT).json()
        assert made["owner"] == "red"
        assert pin(live, bearer("cat"), prompt=PROMPT).json()["id"] != made["id"]
        for name, owner in (("ann", "red"), ("bob", "red"), ("cat", "blue")):
            report = cache(live, **bearer(name))
            assert [p["owner"] for p in report["pins"]] == [owner]
            assert [tree["owners"] for tree in report["trees"]] == [[owner]]
        path = f"{live.url}/v1/cache/pins/{made['id']}"
        assert live.http.delete(path, headers=bearer("cat")).status_code == 404
        assert live.http.delete(path).status_code == 401
        assert live.http.delete(path, headers=bearer("bob")).status_code == 200
        usage = live.http.get(f"{live.url}/v1/usage", headers=bearer("ann")).json()
        assert usage["total"]["prompt_tokens"] == 40
