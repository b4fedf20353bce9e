"""Engines in processes of their own, stopped while another one is measured."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
from pathlib import Path
from typing import Any

from comparison.environments import Unavailable

PEERS = Path(__file__).resolve().parent.parent / "peers"
LOAD_SECONDS, RUN_SECONDS = 600, 1800


class Worker:
    """One engine with one set of weights. It only runs between `wake` and `sleep`, or inside `run`."""

    def __init__(self, name: str, python: Path, script: str, settings: dict[str, Any], log: Path) -> None:
        self.name = name
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [str(python), str(PEERS / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            answer = self._ask(settings, LOAD_SECONDS)
        except BaseException:
            self.close()
            raise
        self.version: str = answer["version"]
        self.load_seconds: float = answer["load_s"]
        self._signal(signal.SIGSTOP)

    def run(self, prompts: list[list[int]], num_output: int) -> dict[str, Any]:
        """One workload; all other workers must be asleep."""
        self._signal(signal.SIGCONT)
        try:
            return self._ask({"prompts": prompts, "num_output": num_output}, RUN_SECONDS)
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable("the worker ended") from None
        line = self._read_line(seconds)
        if not line:
            raise Unavailable(f"the worker ended with {self._process.wait()} (log: {self._log.name})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def _read_line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise Unavailable(f"no answer within {seconds:g} s")
        return self._process.stdout.readline()
