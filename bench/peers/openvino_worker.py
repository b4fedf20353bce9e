"""OpenVINO GenAI's ContinuousBatchingPipeline: a KV cache of 2 GB, prefix caching off, split-fuse on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from common import Run, work


def load(settings: dict[str, Any]) -> tuple[str, Run]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = settings["kv_gb"]
    scheduler.enable_prefix_caching = False  # repeats send the same prompts
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_seqs = settings["max_seqs"]
    properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)

    def run(prompts: list[list[int]], num_output: int) -> tuple[float, float | None, list[list[int]]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_output, True, False
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        start = time.perf_counter()
        results = pipeline.generate(inputs, [config] * len(prompts))
        seconds = time.perf_counter() - start
        outputs = [list(map(int, result.m_generation_ids[0])) for result in results]
        return seconds, None, outputs

    return openvino_genai.__version__, run


work(load)
