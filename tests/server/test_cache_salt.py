"""`cache_salt` over HTTP: who shares what, and which values are refused (C103)."""

import pytest
from support.live_server import LiveServer

ROUTES = ("/v1/completions", "/v1/chat/completions")


def body_for(path, text):
    return {"prompt": text} if path == ROUTES[0] else {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("path", ROUTES)
def test_a_salt_isolates(live: LiveServer, path: str) -> None:
    """The same prompt with "a", "a", "b", none, none, null and "": the last three are no salt."""
    body = {**body_for(path, f"salted {path} " + "x" * 40), "max_tokens": 2, "temperature": 0}
    asked = [{"cache_salt": salt} for salt in ("a", "a", "b")] + [{}, {}, {"cache_salt": None}, {"cache_salt": ""}]
    answers = [live.post(path, {**body, **salt}).json() for salt in asked]
    num_prompt = answers[0]["usage"]["prompt_tokens"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    first_salt, second_salt, other_salt, none, *again = cached
    # A chat template begins every prompt alike, so that without a salt others may have sent its beginning.
    assert (first_salt, second_salt, other_salt) == (0, num_prompt - 1, 0)
    assert none < num_prompt - 1 and again == [num_prompt - 1] * 3
    choices = [answer["choices"][0] for answer in answers]
    assert len({choice.get("text") or choice["message"]["content"] for choice in choices}) == 1


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("salt", [5, True, ["a"], {"a": 1}, "s" * 257, "s" * 10_000_000], ids=lambda s: repr(s)[:12])
def test_what_is_no_salt_is_refused(live: LiveServer, path: str, salt: object) -> None:
    answer = live.post(path, {**body_for(path, "x"), "cache_salt": salt})
    assert answer.status_code in (400, 413) and len(answer.content) < 4096
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "cache_salt"
    live.check_idle_and_live()
