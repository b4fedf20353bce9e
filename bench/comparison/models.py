"""The same weights in every peer's format: GGUF types for llama.cpp, a Hugging Face directory, OpenVINO's export."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from comparison.environments import OPENVINO_EXPORT, Say, Unavailable, last_line
from octavo.models.loading import LoadedModel, load_model
from octavo.models.spec import ModelSpec
from octavo.weights.files import ModelFiles
from octavo.weights.formats import FORMATS

PEERS = Path(__file__).resolve().parent.parent / "peers"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EXPORT_SECONDS = 3600


def gguf_of_type(files: ModelFiles, name: str, directory: Path, python: Path, say: Say) -> Path:
    """The model's GGUF file, requantised by llama.cpp unless its main type is `name` already."""
    if files.kind != "gguf":
        raise Unavailable("llama.cpp needs a GGUF file, and the model is a directory")
    if name == main_type(files):
        return files.path
    target = directory / f"{name}.gguf"
    if not target.is_file():
        say(f"requantising to {name}")
        directory.mkdir(parents=True, exist_ok=True)
        _call([str(python), str(PEERS / "llama_cpp_quantize.py"), str(files.path), str(target), name], target)
    return target


def main_type(files: ModelFiles) -> str:
    """The format that most bytes of the weights are in."""
    sizes: dict[str, int] = {}
    for view in load_model(files).tensors.values():
        sizes[view.format] = sizes.get(view.format, 0) + view.data.nbytes
    return max(sizes, key=lambda name: sizes[name])


def _call(command: list[str], target: Path) -> None:
    log = target.with_name(target.name + ".log")
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=EXPORT_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{target.name}: not made within {EXPORT_SECONDS} s") from None
    if done.returncode != 0:
        raise Unavailable(f"{target.name}: {last_line(log)}")


# ---------------------------------------------------------------------------- Hugging Face directory


def hugging_face_directory(files: ModelFiles, directory: Path, say: Say) -> Path:
    """config.json, tokenizer.json and float32 weights that hold exactly the values of the GGUF file."""
    if files.kind == "directory":
        return files.path
    target = directory / "hugging-face"
    if not (target / "config.json").is_file():
        say("dequantising to a Hugging Face directory")
        target.mkdir(parents=True, exist_ok=True)
        model = load_model(files)
        _write_tokenizer(model, target)
        _write_safetensors(model, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(_config(model.spec, model.generation_config), indent=1))
    return target


def _config(spec: ModelSpec, generation: dict[str, Any]) -> dict[str, Any]:
    if spec.rope_scaling.kind != "default" or spec.sliding_windows:
        raise Unavailable("only models without rope scaling and sliding windows are turned into a directory")
    return {
        "architectures": [ARCHITECTURES[spec.architecture]],
        "model_type": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
        "torch_dtype": "float32",
        "eos_token_id": generation.get("eos_token_id"),
    }


def _write_tokenizer(model: LoadedModel, target: Path) -> None:
    from octavo.text.tokenizer_gguf import read_gguf_tokenizer

    assert isinstance(model.tokenizer_source, dict)
    parts = read_gguf_tokenizer(model.tokenizer_source)
    parts.backend.save(str(target / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}
    if parts.chat_template:
        config["chat_template"] = parts.chat_template
    (target / "tokenizer_config.json").write_text(json.dumps(config))


def _write_safetensors(model: LoadedModel, path: Path) -> None:
    """Header length as little-endian uint64, JSON header, then the tensors: the safetensors format, in F32."""
    views = [view for name, view in sorted(model.tensors.items()) if name != "rope_freqs.weight"]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for view in views:
        num_bytes = int(np.prod(view.shape)) * 4
        header[view.name] = {"dtype": "F32", "shape": list(view.shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as output:
        output.write(len(encoded).to_bytes(8, "little") + encoded)
        for view in views:
            output.write(FORMATS[view.format].unpack(view.data).astype("<f4").tobytes())
    partial.replace(path)


# ---------------------------------------------------------------------------- OpenVINO


def openvino_directory(files: ModelFiles, weight_format: str, directory: Path, cache: Path, say: Say) -> Path:
    """Exported with `optimum-cli export openvino --weight-format fp16|int8`, in an environment of its own."""
    target = directory / f"openvino-{weight_format}"
    if not (target / ".done").is_file():
        source = hugging_face_directory(files, directory, say)
        python = OPENVINO_EXPORT.ensure(cache, say)
        say(f"exporting to OpenVINO {weight_format}")
        command = [str(python), "-c", "from optimum.commands.optimum_cli import main; main()", "export", "openvino"]
        task = ["--task", "text-generation-with-past", "--weight-format", weight_format]
        _call([*command, "-m", str(source), *task, str(target)], target)
        if not (target / "openvino_model.xml").is_file():
            raise Unavailable(f"optimum-cli left no openvino_model.xml in {target}")
        (target / ".done").touch()
    return target
