"""serve_fake.py in a process of its own, and ways to see what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

TESTS = Path(__file__).resolve().parent.parent


@dataclass
class Program:
    """serve_fake.py in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    http: httpx.Client
    streams: list[list[bytes]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def body(self, **fields: Any) -> bytes:
        return json.dumps({"model": "fake", "prompt": "hi", "temperature": 0, **fields}).encode()

    def start_stream(self, max_tokens: int) -> list[bytes]:
        """Reads a stream in a thread; returns the list that its lines go to, once the first is there."""
        lines: list[bytes] = []
        self.streams.append(lines)
        begun = threading.Event()

        def read() -> None:
            with (
                contextlib.suppress(httpx.HTTPError),
                httpx.stream(
                    "POST",
                    f"http://127.0.0.1:{self.port}/v1/completions",
                    content=self.body(max_tokens=max_tokens, stream=True),
                    timeout=30,
                ) as response,
            ):
                for line in response.iter_lines():
                    if line:
                        lines.append(line.encode())
                        begun.set()
            begun.set()

        thread = threading.Thread(target=read)
        self.threads.append(thread)
        thread.start()
        assert begun.wait(10)
        return lines

    def end(self) -> int:
        code = self.process.wait(15)
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        return code

    def children(self) -> list[int]:
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
            return [int(pid) for pid in file.read().split()]


@contextlib.contextmanager
def program(directory: Path, shutdown_timeout: float, port: int = 0, **options: Any) -> Iterator[Program]:
    """`options`: see serve_fake.py."""
    given = {"model": str(directory), "port": port, "shutdown_timeout": shutdown_timeout, **options}
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "server" / "serve_fake.py"), json.dumps(given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])},
        process_group=0,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), process.communicate(timeout=10)[1]
        with httpx.Client(timeout=20) as http:
            yield Program(process, int(line.split()[1]), http)
    finally:
        # Its engine, too: a stopped one would hold the pipes open for ever.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a child stayed behind"
        time.sleep(0.01)


def check_port_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()
