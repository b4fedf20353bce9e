"""Tenants: salts from a secret of this installation, isolation of caches and explanations (C103)."""

import hashlib
import hmac
import stat
import threading

import pytest
from support.live_server import live_server

from octavo.errors import ConfigError
from octavo.server.keys import Key, KeyRing
from octavo.server.ledger import Ledger
from octavo.server.quotas import Accounts
from octavo.server.tenants import SECRET_FILE, TenantSalts, load_secret

PROMPT = "p" * 40


def key(name, tenant):
    return Key(name=name, digest=hashlib.sha256(f"{name}-secret".encode()).digest(), tenant=tenant)


KEYS = (key("ann", "red"), key("bob", "red"), key("cat", "blue"))


@pytest.fixture(params=[True, False], ids=["isolated", "opted out"])
def isolated(request):
    return request.param


@pytest.fixture
def live(tmp_path, isolated):
    settings = {"accounts": Accounts(KeyRing(list(KEYS)), Ledger(None)), "salt_secret": b"s" * 32 if isolated else None}
    with live_server(tmp_path, settings=settings) as server:
        yield server


def ask(live, name, **body):
    response = live.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, **body}, Authorization=f"Bearer {name}-secret"
    )
    assert response.status_code == 200, response.text
    return response


def cached(live, name, **body):
    return ask(live, name, **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_hits_stay_within_a_tenant(live, isolated):
    assert cached(live, "ann") == 0
    assert cached(live, "bob") > 0  # another key of the same tenant
    assert (cached(live, "cat") > 0) is not isolated
    assert cached(live, "cat") > 0


def test_a_client_salt_divides_further(live, isolated):
    assert cached(live, "ann", cache_salt="x") == 0
    assert cached(live, "ann", cache_salt="y") == 0
    assert cached(live, "bob", cache_salt="x") > 0
    assert (cached(live, "cat", cache_salt="x") > 0) is not isolated


def test_explanations_stay_within_a_tenant(live):
    name = ask(live, "ann").headers["x-request-id"]
    for who, status in (("ann", 200), ("bob", 200), ("cat", 404)):
        response = live.http.get(f"{live.url}/v1/requests/{name}", headers={"Authorization": f"Bearer {who}-secret"})
        assert response.status_code == status


def test_a_miss_tells_nothing_about_other_tenants(live, isolated):
    ask(live, "ann", cache_salt="x")

    def reason(name):
        body = ask(live, name, cache_salt=name, explain=True).json()
        return body["octavo"]["prompts"][0]["engine"]["samples"][0]["miss_reason"]

    assert reason("cat") == "never_seen"
    ask(live, "ann", cache_salt="x")


# ---------------------------------------------------------------- the salt


def test_the_salt_is_an_hmac():
    salts = TenantSalts(b"k" * 32)
    message = (3).to_bytes(8, "little") + b"red" + b"own"
    assert salts.salt("red", "own") == "tenant " + hmac.new(b"k" * 32, message, hashlib.sha256).hexdigest()


def test_no_two_tenants_share_a_salt():
    """Tagged and length-delimited: a name and a salt cannot be shifted into each other."""
    salts = TenantSalts(b"k" * 32)
    made = {salts.salt(t, c) for t, c in (("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("a", ""), ("", ""))}
    assert len(made) == 6
    assert TenantSalts(b"l" * 32).salt("a", "b") != salts.salt("a", "b")
    assert TenantSalts(None).salt("a", "b") == "b"


def test_a_client_cannot_forge_another_tenants_salt():
    salts = TenantSalts(b"k" * 32)
    assert salts.salt("blue", salts.salt("red", "")) != salts.salt("red", "")


# ---------------------------------------------------------------- the secret


def test_the_secret_is_made_once_for_its_owner_only(tmp_path):
    state = tmp_path / "a" / "b"
    first = load_secret(state)
    assert len(first) == 32
    assert load_secret(state) == first
    assert load_secret(tmp_path / "other") != first
    assert stat.S_IMODE((state / SECRET_FILE).stat().st_mode) == 0o600
    assert [p.name for p in state.iterdir()] == [SECRET_FILE]


def test_servers_that_start_together_agree(tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(load_secret(tmp_path / "s"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_secret_is_refused(tmp_path, content):
    path = tmp_path / SECRET_FILE
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"state_dir.*32 bytes"):
        load_secret(tmp_path)


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    load_secret(tmp_path)
    (tmp_path / SECRET_FILE).chmod(0o644)
    with pytest.raises(ConfigError, match="0600"):
        load_secret(tmp_path)


def test_without_a_place_to_write_it_lives_as_long_as_the_process(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert len(load_secret(blocked / "state")) == 32
    assert "until this process ends" in caplog.text
