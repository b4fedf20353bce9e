"""A soak of a minute in CI; `make soak` runs it for ten minutes (SOAK_SECONDS, SOAK_SEED, SOAK_MODEL)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

from support.live_server import write_tokenizer
from support.served_program import check_port_free, program, wait_gone
from support.soak import Soak

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
MODEL = os.environ.get("SOAK_MODEL")  # an alias or a path instead of the scripted engine


def test_soak(tmp_path: Path) -> None:
    """No wrong byte, no stuck request, no leak; the engine is killed at least twice on the way."""
    seed = int(os.environ.get("SOAK_SEED", random.randrange(2**32)))
    print(f"SOAK_SEED={seed}")
    directory = Path(MODEL) if MODEL else write_tokenizer(tmp_path)
    assemble = "octavo.assemble:assemble" if MODEL else "support.scripted_process:crowded"
    with program(directory, 10.0, assemble=assemble, max_restarts=10**6, served_model_name="soak") as served:
        soak = Soak(served, "soak", seed=seed)
        served.http.get(f"{soak.url}/health")
        files_before = soak.num_files()
        asyncio.run(soak.run(SECONDS, kill_every=max(5.0, SECONDS / 30)))
        print(dict(soak.report), f"RSS {soak.rss_now() / 1e6:.0f} MB, {soak.rss_growth() / 1e6:+.2f} MB/min")

        deadline = time.monotonic() + 30
        while not soak.idle():
            assert time.monotonic() < deadline, f"something is left: {soak.metrics()}"
            time.sleep(0.1)
        assert soak.report["kill"] >= 2
        assert soak.metrics()["octavo_engine_restarts_total"] == soak.report["kill"]
        deadline = time.monotonic() + 10
        while soak.num_files() > files_before:
            assert time.monotonic() < deadline, f"{soak.num_files()} open files, {files_before} at the start"
            time.sleep(0.1)
        if SECONDS >= 120:  # before, the allocator is still filling its pools
            assert soak.rss_growth() < 4e6, "the front end's memory keeps growing"
        else:
            assert soak.rss[-1][1] - soak.rss[len(soak.rss) // 2][1] < 32e6
        children = served.children()
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == 0
        wait_gone(children)
        check_port_free(served.port)
