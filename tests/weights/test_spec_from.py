"""ModelSpec from config.json and from GGUF metadata: defaults, scaling, windows, and clear refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_models import TINY_CONFIG, tiny_spec

from octavo.errors import CorruptFileError, UnsupportedError
from octavo.models.spec import ModelSpec, RopeScaling
from octavo.models.spec_from import spec_from_config, spec_from_gguf
from octavo.weights.files import TensorView

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_llama() -> None:
    assert spec_from_config(TINY_CONFIG) == ModelSpec(
        architecture="llama",
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    )


def test_optional_fields() -> None:
    spec = tiny_spec(num_key_value_heads=None, head_dim=None, tie_word_embeddings=True, mlp_bias=True)
    assert (spec.num_kv_heads, spec.head_dim, spec.tie_embeddings, spec.mlp_bias) == (4, 8, True, True)
    assert tiny_spec(head_dim=16).head_dim == 16
    assert tiny_spec(hidden_size=33, head_dim=16).head_dim == 16


@pytest.mark.parametrize(
    ("model_type", "flag", "qkv", "out", "norm"),
    [
        ("llama", False, False, False, False),
        ("llama", True, True, True, False),
        ("mistral", True, False, False, False),
        ("qwen2", False, True, False, False),
        ("qwen3", False, False, False, True),
        ("qwen3", True, True, True, True),
    ],
)
def test_biases_and_norms(model_type: str, flag: bool, qkv: bool, out: bool, norm: bool) -> None:
    spec = tiny_spec(model_type=model_type, attention_bias=flag)
    assert (spec.attention_bias, spec.attention_out_bias, spec.qk_norm) == (qkv, out, norm)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "linear", "rope_type": "llama3", **LLAMA3}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}},
    ],
)
def test_llama3_scaling(scaling: dict[str, Any]) -> None:
    spec = tiny_spec(**scaling)
    assert spec.rope_scaling == LLAMA3_SCALING
    assert spec.rope_theta == 10000.0
    assert spec.max_position == 128


@pytest.mark.parametrize("scaling", [None, {}, {"type": "default"}, {"rope_type": "default"}])
def test_no_scaling(scaling: object) -> None:
    assert tiny_spec(rope_scaling=scaling).rope_scaling == RopeScaling()


def test_linear_scaling_does_not_stretch_the_context_again() -> None:
    spec = tiny_spec(rope_scaling={"type": "linear", "factor": 4}, max_position_embeddings=64)
    assert spec.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    assert spec.max_position == 64


def test_theta_of_rope_parameters_wins() -> None:
    assert tiny_spec(rope_parameters={"rope_type": "default", "rope_theta": 500000}).rope_theta == 500000.0
    assert tiny_spec(rope_theta=None).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_bigcode"}, "'gpt_bigcode' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": "x" * 5000}, "architecture 'xxx"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "method 'gptq'"),
        ({"num_local_experts": 8}, "experts"),
        ({"head_dim": 7}, "odd head sizes"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["linear_attention"] * 2},
            "layer type 'linear_attention'",
        ),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        tiny_spec(**changes)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model_type: missing"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "32"}, "hidden_size: must be a whole number"),
        ({"hidden_size": True}, "hidden_size: must be a whole number"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "cannot share 3 key/value heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_scaling": "llama3"}, "rope_scaling: must be an object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling: low_freq_factor: missing"),
        ({"rope_scaling": {"type": "linear"}}, "factor: missing"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "must list 2 layers"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptFileError) as caught:
        tiny_spec(**changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "llama", "sliding_window": 8}, ()),
        ({"model_type": "qwen2", "sliding_window": 8}, ()),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (8, 8)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, ()),
        ({"model_type": "qwen2", "sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, ()),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
    ],
)
def test_sliding_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert tiny_spec(**changes).sliding_windows == windows


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    given = {k: v for k, v in TINY_CONFIG.items() if k not in ("rms_norm_eps", "rope_theta", "model_type")}
    config = transformers.AutoConfig.for_model(model_type, **given)
    ours = spec_from_config({"model_type": model_type, **given})
    from_file = spec_from_config(config.to_dict())
    assert ours == from_file
    assert ours.head_dim == getattr(config, "head_dim", 8)


def test_rope_parameters_as_transformers_writes_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}
    given = {k: v for k, v in TINY_CONFIG.items() if k not in ("rope_theta", "model_type")}
    transformers.AutoConfig.for_model("llama", **given, rope_parameters=rope).save_pretrained(tmp_path)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    assert spec == tiny_spec(rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **LLAMA3})


# --- GGUF ------------------------------------------------------------------------------------------------------------


def gguf_spec(
    architecture: str = "llama", tensors: tuple[str, ...] = ("output.weight",), **changes: object
) -> ModelSpec:
    metadata: dict[str, object] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 2,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": 32,
        f"{architecture}.feed_forward_length": 64,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in changes.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if value is None:
            metadata.pop(name)
        else:
            metadata[name] = value
    empty = np.empty(0, np.uint8)
    views = {name: TensorView(name, (40, 32), "F32", empty, "m") for name in ("token_embd.weight", *tensors)}
    return spec_from_gguf(metadata, views, "m.gguf")


def test_gguf_llama() -> None:
    assert gguf_spec() == tiny_spec()
    assert gguf_spec(tensors=()).tie_embeddings
    assert gguf_spec(attention__head_count_kv=None).num_kv_heads == 4
    assert gguf_spec(attention__key_length=16, attention__value_length=16).head_dim == 16
    assert gguf_spec(attention__head_count_kv=[2, 2], feed_forward_length=[64, 64]) == tiny_spec()
    assert gguf_spec(rope__freq_base=5e5).rope_theta == 5e5
    assert gguf_spec(attention__sliding_window=16).sliding_windows == (16, 16)


def test_gguf_qwen() -> None:
    spec = gguf_spec("qwen2", ("output.weight", "blk.0.attn_q.bias"))
    assert spec.attention_bias
    assert not spec.attention_out_bias
    assert gguf_spec("qwen2").attention_bias
    assert gguf_spec("llama", ("output.weight", "blk.1.attn_q.bias")).attention_bias
    assert gguf_spec("qwen3", attention__key_length=16, attention__value_length=16).qk_norm


def test_gguf_scaling() -> None:
    linear = RopeScaling(kind="linear", factor=4.0)
    assert gguf_spec(rope__scaling__type="linear", rope__scaling__factor=4.0).rope_scaling == linear
    assert gguf_spec(rope__scale_linear=4.0).rope_scaling == linear
    assert gguf_spec(rope__scale_linear=1.0).rope_scaling == RopeScaling()
    assert gguf_spec(rope__scaling__type="none").rope_scaling == RopeScaling()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architecture": "gemma2"}, UnsupportedError, "architecture 'gemma2'"),
        ({"rope__scaling__type": "yarn"}, UnsupportedError, "rope scaling 'yarn'"),
        ({"expert_count": 8}, UnsupportedError, "expert_count"),
        ({"rope__dimension_count": 4}, UnsupportedError, "partial rotation"),
        ({"attention__value_length": 16}, UnsupportedError, "value heads"),
        ({"attention__head_count_kv": [2, 1]}, UnsupportedError, "vary by layer"),
        ({"attention__head_count_kv": [2]}, CorruptFileError, "lists 1 layers instead of 2"),
        ({"block_count": None}, CorruptFileError, "llama.block_count: missing"),
        ({"block_count": 2**32 - 1}, CorruptFileError, "llama.block_count"),
        ({"embedding_length": "x"}, CorruptFileError, "llama.embedding_length"),
        ({"attention__head_count": 3}, CorruptFileError, "cannot share"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        gguf_spec(**changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("m.gguf: ")


def test_gguf_without_basics() -> None:
    with pytest.raises(CorruptFileError, match=r"general\.architecture: missing"):
        spec_from_gguf({}, {}, "m.gguf")
    with pytest.raises(UnsupportedError, match="architecture 'clip'"):
        spec_from_gguf({"general.architecture": "clip"}, {}, "m.gguf")
