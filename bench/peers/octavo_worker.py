"""Octavo itself, on its bare engine: token ids in, token ids out."""

from __future__ import annotations

import time
from typing import Any

from common import Run, work


def load(settings: dict[str, Any]) -> tuple[str, Run]:
    from octavo import SamplingParams, __version__
    from octavo.assemble import assemble
    from octavo.config import EngineOptions

    options = EngineOptions(
        threads=settings["threads"],
        isa=settings.get("isa", "auto"),
        max_model_len=settings["max_len"],
        max_num_seqs=settings["max_seqs"],
        enable_prefix_caching=False,  # repeats send the same prompts
        seed=0,
    )
    assembly = assemble(settings["model"], options)
    engine = assembly.engine
    isa = next((s.value for s in assembly.settings if s.name == "isa"), "")

    def run(prompts: list[list[int]], num_output: int) -> tuple[float, float | None, list[list[int]]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        requests = [engine.make_request(str(i), ids, params) for i, ids in enumerate(prompts)]
        outputs: list[list[int]] = [[] for _ in prompts]
        missing, first = len(prompts), None
        start = time.perf_counter()
        for request in requests:
            engine.add_request(request)
        while engine.has_unfinished:
            for event in engine.step():
                if event.error is not None:
                    raise RuntimeError(event.error)
                mine = outputs[int(event.request_id)]
                if event.token_ids and not mine:
                    missing -= 1
                mine.extend(event.token_ids)
            if first is None and not missing:
                first = time.perf_counter() - start
        return time.perf_counter() - start, first, outputs

    kernels = ", ".join(f"{k} {v}" for k, v in assembly.backend.capabilities.details.items())
    return f"{__version__} ({kernels or isa})", run


work(load)
