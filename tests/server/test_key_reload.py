"""SIGHUP reads the key file again, without a request being lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.live_server import write_tokenizer
from support.served_program import Program, program

OLD, NEW, OTHER = "sk-old-secret-0001", "sk-new-secret-0002", "sk-other-secret-03"


def entry(name: str, secret: str, **limits: int) -> str:
    return f'[keys.{name}]\nkey = "{secret}"\n' + "".join(f"{k} = {v}\n" for k, v in limits.items())


@dataclass
class Keyed:
    """A server with a key file, whose first content is alice's old key."""

    served: Program
    path: Path

    def reload(self, text: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self.path)
        self.served.process.send_signal(signal.SIGHUP)

    def ask(self, secret: str, path: str = "/v1/usage") -> httpx.Response:
        headers = {"Authorization": f"Bearer {secret}"}
        return self.served.http.get(f"http://127.0.0.1:{self.served.port}{path}", headers=headers)

    def wait_for(self, secret: str, code: int) -> None:
        deadline = time.monotonic() + 15
        while self.ask(secret).status_code != code:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice", OLD))
    with program(
        write_tokenizer(tmp_path), 10.0, api_key_file=str(path), log_format="json", state_dir=str(tmp_path)
    ) as served:
        yield Keyed(served, path)


def test_requests_go_on(keyed: Keyed) -> None:
    """A key is replaced while a stream of its owner runs; what was used stays with the name."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        url = f"http://127.0.0.1:{keyed.served.port}/v1/completions"
        body = keyed.served.body(max_tokens=200, stream=True)
        with httpx.stream("POST", url, content=body, headers={"x-api-key": OLD}, timeout=30) as response:
            for line in response.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(15)
    (engine,) = keyed.served.children()
    os.kill(engine, signal.SIGHUP)  # as a terminal that closes would: the engine is none of its business
    keyed.reload(entry("alice", NEW) + entry("bob", OTHER))
    keyed.wait_for(NEW, 200)
    assert keyed.ask(OLD).status_code == 401 and keyed.ask(OTHER).json()["key"] == "bob"
    reader.join(20)
    assert lines[-2] == "data: [DONE]" and not any("error" in line for line in lines)
    assert keyed.served.children() == [engine]
    told = keyed.ask(NEW).json()
    assert (told["key"], told["total"]["requests"], told["active_requests"]) == ("alice", 1, 0)
    assert told["total"]["completion_tokens"] == 200


def test_a_broken_file_changes_nothing(keyed: Keyed) -> None:
    keyed.reload(f'[keys.alice]\nkey = "{NEW}')
    keyed.reload(entry("alice", "short"))
    keyed.reload(entry("alice", OLD) + entry("bob", OTHER))
    keyed.wait_for(OTHER, 200)
    keyed.path.unlink()
    keyed.served.process.send_signal(signal.SIGHUP)
    assert keyed.served.process.stderr is not None
    logged: list[str] = []
    while not any("cannot read" in line for line in logged):
        logged.append(json.loads(keyed.served.process.stderr.readline())["message"])
    assert keyed.ask(OLD).status_code == keyed.ask(OTHER).status_code == 200
    about_keys = [line for line in logged if line.startswith("api_key_file: ")]
    assert about_keys and all(line.endswith("the keys stay as they were") for line in about_keys)
    assert not any(secret in line for line in logged for secret in (OLD, NEW, OTHER))
