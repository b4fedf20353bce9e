"""API keys with names, limits and usage that outlives the server."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from support.live_server import LiveServer, live_server

from octavo.errors import ConfigError
from octavo.server.keys import Key, KeyRing, Limits, load_keys
from octavo.server.ledger import Ledger
from octavo.server.quotas import Account, Accounts, KeyLimitError
from octavo.server.serve import open_accounts

SECRET = "sk-very-secret-0001"
COMPLETIONS = "/v1/completions"


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return path


def key(name: str = "a", secret: str = SECRET, **limits: Any) -> Key:
    digest = hashlib.sha256(secret.encode()).digest()
    return Key(name=name, digest=digest, tenant=f"team-{name}", limits=Limits(**limits))


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


# ---------------------------------------------------------------------------- the file


def test_file(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"another-secret").hexdigest()
    path = write(
        tmp_path,
        f'[keys.alice]\nkey = "{SECRET}"\nmax_concurrency = 2\ntokens_per_day = 1000\n'
        f'[keys."b@x.org"]\nsha256 = "{digest.upper()}"\ntenant = "alice"\n',
    )
    ring = load_keys("the-flag", path)
    assert ring is not None
    assert [(k.name, k.tenant) for k in ring.keys] == [("default", ""), ("alice", "alice"), ("b@x.org", "alice")]
    alice = ring.find(SECRET.encode())
    assert alice is not None and alice.limits == Limits(max_concurrency=2, tokens_per_day=1000)
    assert ring.find(b"another-secret") is ring.keys[2] and ring.find(b"the-flag") is ring.keys[0]
    assert ring.find(b"") is None and ring.find(digest.encode()) is None
    assert SECRET not in repr(ring.keys)
    assert load_keys(None, None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'[keys.a]\nkey = "{SECRET}', "not valid TOML"),
        ("", "expected tables"),
        ("keys = 3", "expected tables"),
        ("[keys]", "expected tables"),
        (f'[keys.a]\nkey = "{SECRET}"\n[other]', "expected tables"),
        ("[keys]\na = 1", "not a table"),
        ("[keys.a]", "either key or sha256"),
        (f'[keys.a]\nkey = "{SECRET}"\nsha256 = "{"0" * 64}"', "either key or sha256"),
        ('[keys.a]\nkey = "short"', "keys.'a'.key must have 8 to 512"),
        ('[keys.a]\nkey = "with a space"', "no space"),
        ("[keys.a]\nkey = 12345678", "keys.'a'.key"),
        ('[keys.a]\nsha256 = "zz"', "64 hexadecimal"),
        (f'[keys.a]\nkey = "{SECRET}"\ntokens_per_year = 1', "unknown field 'tokens_per_year'"),
        (f'[keys.a]\nkey = "{SECRET}"\nmax_concurrency = -1', "max_concurrency must be an integer"),
        (f'[keys.a]\nkey = "{SECRET}"\nmax_concurrency = true', "max_concurrency must be an integer"),
        (f'[keys.a]\nkey = "{SECRET}"\ntokens_per_day = 1.5', "tokens_per_day must be an integer"),
        (f'[keys.a]\nkey = "{SECRET}"\ntenant = ""', "tenant"),
        (f'[keys."a b"]\nkey = "{SECRET}"', "a name has"),
        (f'[keys.a]\nkey = "{SECRET}"\n[keys.b]\nkey = "{SECRET}"', "the same key"),
        (f'[keys.default]\nkey = "{SECRET}"', "the same name"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_keys("flag-key", write(tmp_path, text))
    assert SECRET not in str(caught.value) and "\n" not in str(caught.value)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_keys(None, tmp_path / "nowhere")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe" * 10)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_keys(None, binary)
    with pytest.raises(ConfigError, match="usage_db needs keys"):
        open_accounts(None, None, str(tmp_path / "x"))


# ---------------------------------------------------------------------------- counting


def test_ledger_outlives_the_server(tmp_path: Path) -> None:
    clock, path = Clock(86400.0 * 10 + 100), tmp_path / "usage.db"
    ledger = Ledger(path, now=clock)
    ledger.add("a", 1, 10, 5)
    ledger.add("a", 1, 1, 2)
    ledger.close()
    ledger = Ledger(path, now=clock)
    assert (ledger.today("a").num_tokens, ledger.total("a").num_requests) == (18, 2)
    clock.now += 86400
    assert ledger.today("a").num_tokens == 0
    ledger.add("a", 1, 1, 0)
    assert (ledger.today("a").num_tokens, ledger.total("a").num_tokens) == (1, 19)
    assert ledger.seconds_to_midnight() == 86300
    other = Ledger(path, now=clock)  # a second server adds to the same sums
    other.add("a", 1, 100, 0)
    other.close()
    ledger.close()
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT * FROM usage WHERE name = 'a' ORDER BY day").fetchall()
    database.close()
    assert rows == [("a", "1970-01-11", 2, 11, 7), ("a", "1970-01-12", 2, 101, 0)]


def test_bad_ledger(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database, whatever its name says" * 100)
    for path in (garbage, tmp_path / "no" / "such" / "directory.db"):
        with pytest.raises(ConfigError, match="usage_db: cannot use"):
            Ledger(path)


def test_ledger_that_cannot_be_written_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost: what could not be written goes with the next attempt."""
    ledger = Ledger(tmp_path / "usage.db")
    ledger._stop.set()
    assert ledger._thread is not None
    ledger._thread.join()
    database, ledger._database = ledger._database, sqlite3.connect(":memory:", check_same_thread=False)
    ledger.add("a", 1, 2, 3)
    with caplog.at_level(logging.ERROR):
        ledger.flush()
        ledger.flush()
    assert len(caplog.records) == 1
    ledger._database.close()
    ledger._database = database
    ledger.close()
    assert Ledger(tmp_path / "usage.db").total("a").num_tokens == 5


def test_rate(tmp_path: Path) -> None:
    """A bucket of a minute's requests that fills evenly."""
    clock = Clock()
    account = Account(key(requests_per_minute=6), Ledger(None), clock)
    for _ in range(6):
        account.leave(account.enter())
    for seconds, retry in ((0, 10), (3.5, 7), (6.4, 1)):
        clock.now += seconds
        with pytest.raises(KeyLimitError, match="6 requests a minute") as caught:
            account.enter()
        assert (caught.value.retry_after, caught.value.code) == (retry, "rate_limit_exceeded")
    clock.now += 0.2
    account.enter()
    clock.now += 1e6
    for _ in range(6):
        account.enter()
    with pytest.raises(KeyLimitError):
        account.enter()
    closed = Account(key(requests_per_minute=0), Ledger(None), clock)
    with pytest.raises(KeyLimitError):
        closed.enter()


def test_quotas_and_concurrency() -> None:
    clock = Clock(86400.0)
    ledger = Ledger(None, now=clock)
    account = Account(key(max_concurrency=1, tokens_per_day=10, tokens_total=15), ledger, clock)
    spent = account.enter()
    with pytest.raises(KeyLimitError, match="1 requests running") as caught:
        account.enter()
    assert caught.value.status == 429
    spent.num_prompt_tokens, spent.num_generated_tokens = 4, 6
    account.leave(spent)
    with pytest.raises(KeyLimitError, match="10 tokens of today") as caught:
        account.enter()
    assert caught.value.retry_after == 86400 and caught.value.code == "insufficient_quota"
    clock.now += 86400
    spent = account.enter()
    spent.num_prompt_tokens = 5
    account.leave(spent)
    with pytest.raises(KeyLimitError, match="its 15 tokens"):
        account.enter()
    assert account.describe()["total"] == {"requests": 2, "prompt_tokens": 9, "completion_tokens": 6}


def test_limits_change_and_counts_stay() -> None:
    clock = Clock()
    accounts = Accounts(
        KeyRing([key(max_concurrency=2, requests_per_minute=2), key("b", "second-secret")]), Ledger(None), now=clock
    )
    account = accounts.find(SECRET.encode())
    assert account is not None
    running = [account.enter(), account.enter()]
    accounts.use(KeyRing([key("a", "new-secret", max_concurrency=3)]))
    assert accounts.find(SECRET.encode()) is None and accounts.find(b"second-secret") is None
    assert accounts.find(b"new-secret") is account and account.num_active == 2
    running.append(account.enter())
    with pytest.raises(KeyLimitError, match="3 requests running"):
        account.enter()
    for spent in running:
        account.leave(spent)
    accounts.use(KeyRing([key("a", "new-secret", requests_per_minute=1)]))
    account.leave(account.enter())
    with pytest.raises(KeyLimitError, match="1 requests a minute"):
        account.enter()
    accounts.use(KeyRing([key("a", SECRET, requests_per_minute=1)]))  # no way to a fresh allowance
    with pytest.raises(KeyLimitError, match="1 requests a minute"):
        account.enter()
    assert account.describe()["total"]["requests"] == 4 and [name for name, _ in accounts.all()] == ["a"]


# ---------------------------------------------------------------------------- over HTTP


def accounts(*keys: Key) -> Accounts:
    return Accounts(KeyRing(list(keys)), Ledger(None))


def usage(live: LiveServer, secret: str) -> Any:
    return live.http.get(f"{live.url}/v1/usage", headers=bearer(secret)).json()


def test_usage_is_counted(tmp_path: Path) -> None:
    """Prompts once, samples all; streams too, and clients that leave; refused requests cost nothing but a request."""
    with live_server(tmp_path, settings={"accounts": accounts(key(), key("b", "second-secret"))}) as live:
        live.post(COMPLETIONS, {"prompt": "abc", "n": 2, "max_tokens": 5}, **bearer(SECRET))
        live.post(COMPLETIONS, {"prompt": "abcd", "stream": True, "max_tokens": 5}, **bearer(SECRET))
        assert live.post(COMPLETIONS, {"prompt": "abc", "n": -1}, **bearer(SECRET)).status_code == 400
        assert live.post(COMPLETIONS, {"prompt": "abc" * 999}, **bearer(SECRET)).status_code == 400
        live.wait_until(lambda: usage(live, SECRET)["active_requests"] == 0)
        told = usage(live, SECRET)
        assert told["key"] == "a" and told["limits"]["max_concurrency"] is None
        assert told["total"] == told["today"] == {"requests": 4, "prompt_tokens": 7, "completion_tokens": 15}
        assert usage(live, "second-secret")["total"]["requests"] == 0


def test_limits_over_http(tmp_path: Path) -> None:
    keys = accounts(key(max_concurrency=1), key("b", "second-secret", requests_per_minute=1))
    with live_server(tmp_path, settings={"accounts": keys}) as live:
        live.model.gate.clear()
        head = {"prompt": "x", "max_tokens": 3}
        with live.send_raw(COMPLETIONS, head) as unknown:
            assert b"401" in unknown.recv(100)
        codes: list[int] = []
        first = threading.Thread(
            target=lambda: codes.append(live.post(COMPLETIONS, head, **bearer(SECRET)).status_code)
        )
        first.start()
        live.wait_until(lambda: live.client.num_open == 1)
        refused = live.post(COMPLETIONS, head, **bearer(SECRET))
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "concurrency_limit_exceeded")
        anthropic = live.post("/v1/messages", head, **{"x-api-key": SECRET})
        assert anthropic.status_code == 429 and anthropic.json()["error"]["type"] == "rate_limit_error"
        assert live.http.get(f"{live.url}/v1/models", headers=bearer(SECRET)).status_code == 200
        live.model.gate.set()
        first.join()
        assert codes == [200]
        live.wait_until(lambda: usage(live, SECRET)["active_requests"] == 0)
        assert live.post(COMPLETIONS, head, **bearer(SECRET)).status_code == 200
        assert live.post(COMPLETIONS, head, **bearer("second-secret")).status_code == 200
        limited = live.post(COMPLETIONS, head, **bearer("second-secret"))
        assert limited.status_code == 429 and 1 <= int(limited.headers["retry-after"]) <= 60


def test_tenant_reaches_the_engine(tmp_path: Path) -> None:
    with live_server(tmp_path, settings={"accounts": accounts(key())}) as live:
        seen = []
        add = live.engine.add_request
        live.engine.add_request = lambda request: (seen.append(request.tenant), add(request))[1]  # type: ignore
        live.post(COMPLETIONS, {"prompt": "x"}, **bearer(SECRET))
        assert seen == ["team-a"]


def test_no_keys(live: LiveServer) -> None:
    assert live.http.get(f"{live.url}/v1/usage").status_code == 404


def test_keys_are_never_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        live_server(tmp_path, settings={"accounts": accounts(key())}) as live,
    ):
        live.post(COMPLETIONS, {"prompt": "x"}, **bearer(SECRET))
        live.post(COMPLETIONS, {"prompt": "x"}, **bearer("wrong-" + SECRET))
        live.http.get(f"{live.url}/metrics", headers=bearer(SECRET))
        assert SECRET not in live.http.get(f"{live.url}/metrics", headers=bearer(SECRET)).text
    ours = [r for r in caplog.records if not r.name.startswith(("httpcore", "httpx"))]
    assert not any(SECRET in r.getMessage() for r in ours)
