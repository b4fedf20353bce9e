"""llama.cpp through llama-cpp-python's low-level API: batched decoding as in its llama-batched-bench, greedy.

One context per number of sequences, flash attention on, KV per sequence (not unified), n_batch 2048, n_ubatch 512.
The argmax over the logits is numpy's; that benchmark of llama.cpp itself draws no tokens at all.
"""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
import numpy as np

from common import Run, work

N_BATCH, N_UBATCH = 2048, 512


class Sequences:
    """One context for a fixed number of sequences of a given length."""

    def __init__(self, model: Any, num_seqs: int, length: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_seqs * (-(-length // 256) * 256)
        params.n_batch, params.n_ubatch, params.n_seq_max = N_BATCH, N_UBATCH, num_seqs
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = False
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama_init_from_model failed for {num_seqs} sequences of {length} tokens")
        self._batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows of (token, position, sequence, wanted); the most probable successors of those wanted, in order."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with {status}")
        num_wanted = sum(row[3] for row in rows)
        if not num_wanted:
            llama_cpp.llama_synchronize(self._context)
            return []
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self._context), shape=(num_wanted * self._vocab_size,)
        ).reshape(num_wanted, self._vocab_size)
        return [int(token) for token in logits.argmax(axis=1)]

    def run(self, prompts: list[list[int]], num_output: int) -> tuple[float, float | None, list[list[int]]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        start = time.perf_counter()
        rows = [
            (token, position, sequence, position == len(ids) - 1)
            for sequence, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        tokens: list[int] = []
        for at in range(0, len(rows), N_BATCH):
            tokens += self._decode(rows[at : at + N_BATCH])
        first = time.perf_counter() - start
        outputs = [[token] for token in tokens]
        for step in range(num_output - 1):
            tokens = self._decode(
                [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(tokens)],
            )
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        return time.perf_counter() - start, first, outputs


def load(settings: dict[str, Any]) -> tuple[str, Run]:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError("llama_model_load_from_file failed")
    contexts: dict[tuple[int, int], Sequences] = {}

    def run(prompts: list[list[int]], num_output: int) -> tuple[float, float | None, list[list[int]]]:
        key = (len(prompts), max(map(len, prompts)) + num_output)
        if key not in contexts:
            for other in contexts.values():
                other.close()
            contexts.clear()
            contexts[key] = Sequences(model, *key, settings["threads"])
            contexts[key].run([ids[:8] for ids in prompts], 2)  # its first run allocates
        return contexts[key].run(prompts, num_output)

    features = llama_cpp.llama_print_system_info().decode()
    used = [part.split("=")[0].split(":")[-1].strip() for part in features.split("|") if part.strip().endswith("= 1")]
    return f"{llama_cpp.__version__} ({' '.join(name for name in used if name.startswith(('AVX', 'AMX')))})", run


work(load)
