"""The resolved configuration of one engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the scheduler needs to know, all "auto" already resolved. Counts are in tokens or blocks."""

    max_model_len: int
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"

    def __post_init__(self) -> None:
        assert self.block_size > 0 and self.num_blocks > 0 and self.max_model_len > 0
        assert self.max_num_batched_tokens >= 1 and self.max_num_seqs >= 1
