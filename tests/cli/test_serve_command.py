"""`octavo serve` itself, in processes of its own: what one sees from the command to its end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.served_program import wait_gone
from support.tiny_gguf import tiny_gguf


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_and_ends_without_a_word(tmp_path: Path, stop: signal.Signals) -> None:
    """Nothing on stderr, neither of it nor of its engine process; exit 0 and no process left."""
    model = tiny_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-c", "from octavo.cli import main; main()", "serve", str(model)]
    with subprocess.Popen(
        [*command, "--port", "0", "--served-model-name", "tiny", "--kv-cache-memory", "4MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            ready = next(line for line in server.stdout if line.startswith("Ready in "))
            url = ready.partition("curl ")[2].partition("/chat")[0]
            children = [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
            assert len(children) == 1
            asked = {"model": "tiny", "prompt": "abc", "max_tokens": 3, "ignore_eos": True}
            answer = httpx.post(f"{url}/completions", json=asked)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 3
            server.send_signal(stop)
            stdout, stderr = server.communicate(timeout=30)
        finally:
            server.kill()
    assert (server.returncode, stdout, stderr) == (0, "", "")
    wait_gone(children)
