"""From files on disk to a model ready for a backend: a spec and tensors under Hugging Face names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ConfigError, CorruptFileError, ModelError, ModelNotFoundError, UnsupportedError
from octavo.models.spec import ModelSpec
from octavo.models.spec_from import spec_from_config, spec_from_gguf
from octavo.weights.dummy import dummy_tensors
from octavo.weights.files import Checkpoint, ModelFiles, Progress, TensorView, clip
from octavo.weights.formats import FORMATS
from octavo.weights.gguf import read_gguf
from octavo.weights.safetensors import read_safetensors

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
MAX_JSON_BYTES = 64 << 20
ROPE_FREQS = "rope_freqs.weight"


@dataclass(slots=True)
class LoadedModel:
    """A model before any backend has touched it.

    `tensors` have Hugging Face names and layouts: q and k rows in half-split rope order, "lm_head.weight" absent
    iff `spec.tie_embeddings`. One extra may be present: "rope_freqs.weight", F32, head_dim / 2 factors by which
    inv_freq is divided. `tokenizer_source` is GGUF metadata, or the directory with the tokenizer's files.
    `generation_config` is generation_config.json, with "eos_token_id" filled in from config.json.
    """

    name: str
    spec: ModelSpec
    tensors: dict[str, TensorView]
    tokenizer_source: dict[str, Any] | Path
    notes: list[str] = field(default_factory=list)
    generation_config: dict[str, Any] = field(default_factory=dict)


def load_model(
    files: ModelFiles,
    *,
    load_format: str = "auto",
    seed: int = 0,
    dummy_format: str = "BF16",
    progress: Progress | None = None,
) -> LoadedModel:
    """Open a model's files and check that every tensor it needs is there, in the right shape.

    `load_format` "dummy" takes only the configuration from the files and makes random weights in `dummy_format`.
    Raises ModelError (CorruptFileError, UnsupportedError, ModelNotFoundError) naming file and tensor,
    ConfigError for a wrong `load_format` or `dummy_format`.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"--load-format: {clip(load_format)} is none of {', '.join(LOAD_FORMATS)}")
    if files.kind == "gguf":
        if load_format == "safetensors":
            raise ConfigError(f"--load-format safetensors: {files.path.name} is a GGUF file")
        model = _open_gguf(files, progress)
    elif load_format == "gguf":
        raise ConfigError(f"--load-format gguf: {files.path} is a directory without a GGUF file")
    else:
        model = _open_directory(files, with_weights=load_format != "dummy", progress=progress)
    if load_format == "dummy":
        if dummy_format not in FORMATS:
            raise ConfigError(f"dummy weights: format {clip(dummy_format)} is none of {', '.join(FORMATS)}")
        model.tensors, notes = dummy_tensors(expected_shapes(model.spec), dummy_format, seed, progress)
        model.notes = [f"random {dummy_format} weights (seed {seed})", *notes]
    else:
        _keep_expected(model)
    return model


# --- what a model must have ------------------------------------------------------------------------------------------


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this spec needs: Hugging Face name -> shape, (out, in) for matrices."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linear = {  # name -> (out, in, has a bias)
        "self_attn.q_proj": (q_rows, hidden, spec.attention_bias),
        "self_attn.k_proj": (kv_rows, hidden, spec.attention_bias),
        "self_attn.v_proj": (kv_rows, hidden, spec.attention_bias),
        "self_attn.o_proj": (hidden, q_rows, spec.attention_out_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, (rows, cols, has_bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = (rows, cols)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if spec.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (spec.head_dim,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _keep_expected(model: LoadedModel) -> None:
    """Check the tensors against the spec and drop the rest with a note."""
    expected = expected_shapes(model.spec)
    if ROPE_FREQS in model.tensors:
        expected[ROPE_FREQS] = (model.spec.head_dim // 2,)
    missing = [name for name in expected if name not in model.tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CorruptFileError(f"{model.name}: tensor {missing[0]}{more} is missing, as the configuration needs it")
    for name, shape in expected.items():
        view = model.tensors[name]
        if view.shape != shape:
            raise CorruptFileError(
                f"{view.source}: tensor {name} has shape {list(view.shape)}, but the configuration says {list(shape)}"
            )
        if view.format not in FORMATS:
            raise UnsupportedError(
                f"{view.source}: tensor {name} has {view.format}, which is not supported by this version "
                f"(supported: {', '.join(FORMATS)})"
            )
        if name == ROPE_FREQS and view.format != "F32":
            raise UnsupportedError(f"{view.source}: tensor {name} must be F32, not {view.format}")
    _note_extras(model, [name for name in model.tensors if name not in expected])
    model.tensors = {name: model.tensors[name] for name in expected}


def _note_extras(model: LoadedModel, extras: list[str]) -> None:
    # Old checkpoints store inv_freq buffers, which follow from the configuration.
    extras = [name for name in extras if not name.endswith("rotary_emb.inv_freq")]
    if extras:
        listed = ", ".join(clip(name) for name in extras[:3]) + (", …" if len(extras) > 3 else "")
        model.notes.append(f"ignored {len(extras)} tensors that the architecture does not have: {listed}")


# --- GGUF ------------------------------------------------------------------------------------------------------------

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_FREQS: ROPE_FREQS,
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None if the architecture has no such tensor."""
    if gguf_name in _GGUF_TOP:
        return _GGUF_TOP[gguf_name]
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)", gguf_name, re.ASCII)
    if match is None or match[2] not in _GGUF_LAYER:
        return None
    return f"model.layers.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"


def _open_gguf(files: ModelFiles, progress: Progress | None) -> LoadedModel:
    checkpoint = read_gguf(files.path, progress)
    spec = spec_from_gguf(checkpoint.metadata, checkpoint.tensors, files.path.name)
    tensors = {}
    for gguf_name, view in checkpoint.tensors.items():
        name = hf_name(gguf_name)
        tensors[name or gguf_name] = replace(view, name=name or gguf_name)
    if spec.architecture in ("llama", "mistral"):
        _undo_rope_permutation(spec, tensors)
    return LoadedModel(files.name, spec, tensors, checkpoint.metadata, checkpoint.notes)


def _undo_rope_permutation(spec: ModelSpec, tensors: dict[str, TensorView]) -> None:
    """Put q and k rows back into Hugging Face's order.

    Files of the llama kind keep row 2i of a head next to its rotation partner (interleaved); Hugging Face pairs row i
    with row i + head_dim/2. Whole rows move, so quantised rows move as bytes (llama.cpp convert_hf_to_gguf.py,
    LlamaModel.permute, backwards).
    """
    for name, view in tensors.items():
        match = re.fullmatch(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(?:weight|bias)", name)
        heads = 0 if match is None else spec.num_heads if match[1] == "q" else spec.num_kv_heads
        if not heads or view.format not in FORMATS or view.shape[0] != heads * spec.head_dim:
            continue  # a wrong shape or format is reported with all the others
        pairs = view.data.reshape(heads, spec.head_dim // 2, 2, -1)
        tensors[name] = replace(view, data=np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1))


# --- directories -----------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelNotFoundError or CorruptFileError naming the file."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CorruptFileError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB, which is no configuration")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: not valid JSON: {clip(error)}") from None
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path}: must be a JSON object")
    return value


def _open_directory(files: ModelFiles, *, with_weights: bool, progress: Progress | None) -> LoadedModel:
    config = read_json(files.path / "config.json")
    spec = spec_from_config(config, str(files.path / "config.json"))
    generation_path = files.path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    generation["eos_token_id"] = _eos_ids(generation.get("eos_token_id"), config.get("eos_token_id"))
    checkpoint = read_safetensors(files.path, progress) if with_weights else Checkpoint("safetensors", {})
    if spec.tie_embeddings and checkpoint.tensors.pop("lm_head.weight", None) is not None:
        checkpoint.notes.append("ignored lm_head.weight: config.json ties it to the embedding")
    return LoadedModel(files.name, spec, checkpoint.tensors, files.path, checkpoint.notes, generation)


def _eos_ids(*sources: object) -> list[int]:
    """End-of-text ids from numbers or lists of numbers, without repeats, in order."""
    ids: list[int] = []
    for source in sources:
        items: Iterable[object] = source if isinstance(source, list) else [source]
        ids += [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    return list(dict.fromkeys(ids))
