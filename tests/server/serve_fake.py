"""Runs `run_server` on a scripted engine as a program: MODEL_DIRECTORY PORT TIMEOUT; prints a line when ready."""

from __future__ import annotations

import sys

from octavo.config import EngineOptions
from octavo.errors import OctavoError
from octavo.server.serve import ReadyInfo, run_server


def show(info: ReadyInfo) -> None:
    print(f"ready {info.port}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(
            run_server(
                model=sys.argv[1],
                options=EngineOptions(),
                port=int(sys.argv[2]),
                shutdown_timeout=float(sys.argv[3]),
                on_ready=show,
                assemble="support.scripted_process:assemble",
            )
        )
    except OctavoError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
