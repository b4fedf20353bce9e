"""Backends: what executes step plans. Chosen here and only here, by name, imported lazily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from octavo.backends.base import Backend
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.models.loading import LoadedModel

BACKENDS = ("cpu",)


def create(
    name: str,
    model: LoadedModel,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    threads: int | None,
    pins: Sequence[Sequence[int]] = (),
    isa: str = "auto",
    kv_cache_dtype: str = "bfloat16",
    progress: Callable[[float], None] | None = None,
) -> Backend:
    """Build the named backend with the model loaded. Raises ConfigError, ModelError."""
    if name != "cpu":
        raise ConfigError(f"backend {name!r} is none of {', '.join(BACKENDS)}")
    from octavo.backends.cpu.backend import CpuBackend

    return CpuBackend(
        model,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        threads=threads or 1,
        pins=pins,
        isa=isa,
        kv_cache_dtype=kv_cache_dtype,
        progress=progress,
    )
