"""What all workers share: a peer runs in its own virtual environment and answers JSON lines on stdin with JSON lines.

Standard library only, since every environment runs this. First line in: {"model": path, "threads": n, ...}; first
line out: {"version": ..., "load_s": ...}. Then one line per run: {"prompts": [[ids]], "num_output": n} gives
{"seconds": ..., "first_s": seconds until every sequence had a token or null, "output_ids": [[ids]]}.
An exception gives {"error": ...} and ends the worker.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Run = Callable[[list[list[int]], int], tuple[float, float | None, list[list[int]]]]
"""Prompts and output length -> (seconds in all, seconds until every sequence had a token, output ids)."""


def work(load: Callable[[dict[str, Any]], tuple[str, Run]]) -> None:
    """Serves runs until stdin ends. `load` returns the version and the function that runs one workload."""
    # Libraries print what they like: the channel is a copy of stdout, and stdout itself becomes stderr.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        channel.write(json.dumps(answer) + "\n")

    try:
        settings = json.loads(sys.stdin.readline())
        start = time.perf_counter()
        version, run = load(settings)
        say(version=version, load_s=time.perf_counter() - start)
        for line in sys.stdin:
            job = json.loads(line)
            seconds, first, output_ids = run(job["prompts"], job["num_output"])
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            say(seconds=seconds, first_s=first, output_ids=output_ids, peak_rss_bytes=peak)
    except Exception as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        sys.exit(1)
