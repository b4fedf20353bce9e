"""What a model is, in numbers: read from config.json or from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 frequency scaling; see transformers `_compute_llama3_parameters` for the formula.

    `kind` is "default", "linear" (factor only) or "llama3".
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer. Sizes in elements, windows in tokens."""

    architecture: str  # "llama" | "mistral" | "qwen2" | "qwen3"
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # the context length that the model was made for, scaling included
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    tie_embeddings: bool = False
    attention_bias: bool = False  # biases on q, k, v
    attention_out_bias: bool = False  # bias on o
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k
    sliding_windows: tuple[int | None, ...] = ()  # one per layer: None = full attention

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert len(self.sliding_windows) in (0, self.num_layers)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    def window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None
