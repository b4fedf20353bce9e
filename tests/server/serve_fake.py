"""Runs `run_server` on a scripted engine as a program. Its argument is JSON: `model`, fields of ServeOptions and those
of SupervisorOptions; prints a line when ready."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from typing import Any

from octavo import logs
from octavo.config import EngineOptions
from octavo.errors import OctavoError
from octavo.server.serve import ReadyInfo, ServeOptions, run_server
from octavo.server.supervisor import SupervisorOptions


def show(info: ReadyInfo) -> None:
    print(f"ready {info.port}", flush=True)


def main(given: dict[str, Any]) -> int:
    names = {f.name for f in dataclasses.fields(SupervisorOptions)}
    supervision = SupervisorOptions(**{name: given.pop(name) for name in names & set(given)})
    if "log_format" in given:
        logging.basicConfig(level=logging.WARNING)
        logs.use(given["log_format"], "server")
    given.setdefault("assemble", "support.scripted_process:assemble")
    model = given.pop("model")
    serve = ServeOptions(supervision=supervision, **given)
    return run_server(model=model, engine=EngineOptions(seed=0), serve=serve, on_ready=show)


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except OctavoError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
