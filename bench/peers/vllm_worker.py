"""vLLM on the CPU: LLM.generate with token-id prompts, bfloat16, prefix caching off."""

from __future__ import annotations

import os
import time
from typing import Any

from common import Run, work


def load(settings: dict[str, Any]) -> tuple[str, Run]:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings["kv_gb"])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[: settings["threads"]]))
    import vllm

    llm = vllm.LLM(
        model=settings["model"],
        dtype="bfloat16",
        max_model_len=settings["max_len"],
        max_num_seqs=settings["max_seqs"],
        enable_prefix_caching=False,
    )

    def run(prompts: list[list[int]], num_output: int) -> tuple[float, float | None, list[list[int]]]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        start = time.perf_counter()
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - start, None, [list(result.outputs[0].token_ids) for result in results]

    return str(vllm.__version__), run


if __name__ == "__main__":  # vLLM spawns processes that import this file again
    work(load)
