"""Reads a ModelSpec from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import CorruptFileError, UnsupportedError
from octavo.models.spec import ModelSpec, RopeScaling
from octavo.weights.files import TensorView, clip

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

# Limits that no real model reaches: they keep a broken file from asking for absurd allocations.
MAX_SIZE = 1 << 30
MAX_LAYERS = 4096


class _Fields:
    """Typed access to a mapping from an untrusted file; messages name the field."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def wrong(self, key: str, problem: str) -> CorruptFileError:
        return CorruptFileError(f"{self.source}: {self.prefix}{key}: {problem}")

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def size(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """A whole number from 1 to `limit`; a missing or null value is the default."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.wrong(key, "missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise self.wrong(key, f"must be a whole number from 1 to {limit}, not {clip(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.wrong(key, "missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.wrong(key, f"must be a positive number, not {clip(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, not {clip(value)}")
        return value

    def table(self, key: str) -> dict[str, Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, f"must be an object, not {clip(value)}")
        return value


def check_architecture(name: object, source: str) -> str:
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{source}: architecture {clip(name)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def _check_heads(fields: _Fields, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise CorruptFileError(f"{fields.source}: {num_heads} heads cannot share {num_kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise UnsupportedError(f"{fields.source}: odd head sizes are not supported (head_dim {head_dim})")


# --- config.json -----------------------------------------------------------------------------------------------------


def spec_from_config(config: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
    """The spec that a Hugging Face config.json describes.

    Missing optional fields take the defaults of transformers' configuration classes. Raises CorruptFileError
    naming the field, or UnsupportedError naming the architecture or the feature.
    """
    fields = _Fields(config, source)
    architecture = config.get("model_type")
    if architecture is None:
        raise CorruptFileError(f"{source}: model_type: missing")
    architecture = check_architecture(architecture, source)
    _refuse_unsupported(fields)
    hidden_size = fields.size("hidden_size")
    num_layers = fields.size("num_hidden_layers", limit=MAX_LAYERS)
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    head_dim = fields.size("head_dim", 128 if architecture == "qwen3" else max(hidden_size // num_heads, 1))
    _check_heads(fields, num_heads, num_kv_heads, head_dim)
    rope_theta, rope_scaling = _rope_from_config(fields)
    # Qwen2 always has biases on q, k, v and never on o; Mistral has none.
    biased = architecture in ("llama", "qwen3") and fields.flag("attention_bias", False)
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=fields.size("max_position_embeddings", 2048 if architecture == "llama" else 32768),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=biased or architecture == "qwen2",
        attention_out_bias=biased,
        mlp_bias=architecture == "llama" and fields.flag("mlp_bias", False),
        qk_norm=architecture == "qwen3",
        sliding_windows=_windows_from_config(fields, architecture, num_layers),
    )


def _refuse_unsupported(fields: _Fields) -> None:
    """Features that would change the result if they were ignored."""
    activation = fields.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise UnsupportedError(f"{fields.source}: hidden_act {clip(activation)} is not supported (silu is)")
    quantization = fields.table("quantization_config")
    if quantization is not None:
        method = clip(quantization.get("quant_method"))
        raise UnsupportedError(f"{fields.source}: quantization_config: method {method} is not supported")
    if fields.get("num_local_experts") or fields.get("num_experts"):
        raise UnsupportedError(f"{fields.source}: mixtures of experts are not supported")


def _rope_from_config(fields: _Fields) -> tuple[float, RopeScaling]:
    """Base and scaling. `rope_parameters` (transformers 5) holds both; before, rope_theta and `rope_scaling`."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    values = fields.table(key) or {}
    rope = _Fields(values, f"{fields.source}: {key}")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    for where in (rope, fields):
        if where.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(f"{where.source}: partial_rotary_factor is not supported")
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedError(f"{rope.source}: separate rope parameters per kind of layer are not supported")
    # "rope_type" is the newer key, "type" the older one; some files carry both.
    kind = values.get("rope_type", values.get("type")) or "default"
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not low < high:
            raise rope.wrong("high_freq_factor", f"must be above low_freq_factor {low}, not {high}")
        original = rope.size("original_max_position_embeddings")
        return theta, RopeScaling("llama3", rope.number("factor"), low, high, original)
    raise UnsupportedError(f"{rope.source}: rope type {clip(kind)} is not supported (default, linear and llama3 are)")


def _windows_from_config(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; () if no layer has one. As transformers' configuration classes decide."""
    if architecture == "llama":
        return ()
    if architecture == "mistral":
        # Null means none; an absent key means the default of MistralConfig.
        if "sliding_window" in fields.values and fields.get("sliding_window") is None:
            return ()
        return (fields.size("sliding_window", 4096),) * num_layers
    if not fields.flag("use_sliding_window", False):
        return ()
    if "sliding_window" in fields.values and fields.get("sliding_window") is None:
        return ()
    window = fields.size("sliding_window", 4096)
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.get("max_window_layers")
        first = 28 if first is None else first
        if isinstance(first, bool) or not isinstance(first, int):
            raise fields.wrong("max_window_layers", f"must be a whole number, not {clip(first)}")
        slides = [layer >= first for layer in range(num_layers)]
    else:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.wrong("layer_types", f"must list {num_layers} layers")
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                raise UnsupportedError(f"{fields.source}: layer type {clip(kind)} is not supported")
        slides = [kind == "sliding_attention" for kind in kinds]
    return tuple(window if slide else None for slide in slides) if any(slides) else ()


# --- GGUF ------------------------------------------------------------------------------------------------------------


def spec_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorView], source: str = "GGUF file"
) -> ModelSpec:
    """The spec that GGUF metadata describes; `tensors` by GGUF names tell vocabulary, biases and tying.

    The GGUF architecture "llama" covers Llama 2 and 3, SmolLM2, TinyLlama and Mistral. Llama-3 rope scaling
    is not in the metadata: it arrives as the tensor `rope_freqs.weight`. Raises as `spec_from_config`.
    """
    architecture = metadata.get("general.architecture")
    if architecture is None:
        raise CorruptFileError(f"{source}: general.architecture: missing")
    architecture = check_architecture(architecture, source)
    fields = _Fields(metadata, source, prefix=f"{architecture}.")
    num_layers = fields.size("block_count", limit=MAX_LAYERS)
    hidden_size = fields.size("embedding_length")
    num_heads = _same_in_all_layers(fields, "attention.head_count", num_layers)
    num_kv_heads = _same_in_all_layers(fields, "attention.head_count_kv", num_layers, num_heads)
    head_dim = fields.size("attention.key_length", max(hidden_size // num_heads, 1))
    _check_heads(fields, num_heads, num_kv_heads, head_dim)
    _refuse_unsupported_gguf(fields, head_dim)
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptFileError(f"{source}: tensor 'token_embd.weight' is missing")
    window = fields.get("attention.sliding_window")
    windows = () if window in (None, 0) else (fields.size("attention.sliding_window"),) * num_layers
    return ModelSpec(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_same_in_all_layers(fields, "feed_forward_length", num_layers),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=fields.size("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_from_gguf(fields),
        tie_embeddings="output.weight" not in tensors,
        # The metadata does not say which biases there are. One in any layer means that all layers must have them.
        attention_bias=architecture == "qwen2" or any(name.endswith(".attn_q.bias") for name in tensors),
        attention_out_bias=any(name.endswith(".attn_output.bias") for name in tensors),
        mlp_bias=any(name.endswith(".ffn_down.bias") for name in tensors),
        qk_norm=architecture == "qwen3",
        sliding_windows=windows,
    )


def _same_in_all_layers(fields: _Fields, key: str, num_layers: int, default: int | None = None) -> int:
    """A size that GGUF gives as one number or as one number per layer."""
    value = fields.get(key)
    if not isinstance(value, list):
        return fields.size(key, default)
    if len(value) != num_layers or not value:
        raise fields.wrong(key, f"lists {len(value)} layers instead of {num_layers}")
    if any(item != value[0] for item in value):
        raise UnsupportedError(f"{fields.source}: {fields.prefix}{key}: sizes that vary by layer are not supported")
    return _Fields({key: value[0]}, fields.source).size(key)


def _refuse_unsupported_gguf(fields: _Fields, head_dim: int) -> None:
    if fields.get("expert_count"):
        raise UnsupportedError(f"{fields.source}: {fields.prefix}expert_count: mixtures of experts are not supported")
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{fields.source}: value heads of another size than key heads are not supported")
    rotated = fields.size("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedError(
            f"{fields.source}: {fields.prefix}rope.dimension_count {rotated}: partial rotation is not supported "
            f"(head_dim is {head_dim})"
        )


def _rope_from_gguf(fields: _Fields) -> RopeScaling:
    kind = fields.get("rope.scaling.type")
    if kind is None and fields.has("rope.scale_linear"):  # the key of older files
        factor = fields.number("rope.scale_linear")
        return RopeScaling() if factor == 1.0 else RopeScaling(kind="linear", factor=factor)
    if kind in (None, "none"):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=fields.number("rope.scaling.factor"))
    raise UnsupportedError(f"{fields.source}: rope scaling {clip(kind)} is not supported (none and linear are)")
