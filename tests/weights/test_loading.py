"""From files to a LoadedModel: names, row order, and everything accounted for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_writer import GgufFile, Tensor, float_tensor, interleave, model_file
from support.tiny_models import TINY_CONFIG, TINY_SIZES, random_tensors, tiny_spec

from octavo.errors import ConfigError, CorruptFileError, ModelError, ModelNotFoundError, UnsupportedError
from octavo.models.loading import expected_shapes, load_model
from octavo.models.spec import ModelSpec
from octavo.weights.files import ModelFiles
from octavo.weights.formats import FORMATS


def as_floats(view: Any) -> np.ndarray:
    values: np.ndarray = FORMATS[view.format].unpack(view.data).reshape(view.shape)
    return values


def load_gguf(tmp_path: Path, file: GgufFile, **options: Any) -> Any:
    return load_model(ModelFiles("tiny", file.write(tmp_path / "m.gguf")), **options)


def llama_file(**changes: Any) -> GgufFile:
    return model_file("llama", random_tensors(tiny_spec(**changes)), TINY_SIZES)


def assert_same(model: Any, expected: dict[str, np.ndarray]) -> None:
    assert list(model.tensors) == list(expected)
    for name, values in expected.items():
        assert model.tensors[name].name == name
        np.testing.assert_array_equal(as_floats(model.tensors[name]), values)


# --- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_llama_gguf_comes_out_as_hugging_face_has_it(tmp_path: Path, tied: bool) -> None:
    spec = tiny_spec(tie_word_embeddings=tied)
    model = load_gguf(tmp_path, llama_file(tie_word_embeddings=tied))
    assert model.spec.tie_embeddings is tied
    assert ("lm_head.weight" in model.tensors) is not tied
    assert_same(model, random_tensors(spec))
    assert model.name == "tiny"
    assert model.tokenizer_source["general.architecture"] == "llama"


def test_biases_of_q_and_k_are_put_in_order_too(tmp_path: Path) -> None:
    model = load_gguf(tmp_path, llama_file(attention_bias=True, mlp_bias=True))
    assert_same(model, random_tensors(tiny_spec(attention_bias=True, mlp_bias=True)))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rows_stay_where_they_are(tmp_path: Path, architecture: str) -> None:
    spec = tiny_spec(model_type=architecture, head_dim=16)
    model = load_gguf(tmp_path, model_file(architecture, random_tensors(spec), {**TINY_SIZES, "head_dim": 16}))
    assert model.spec.architecture == architecture
    assert_same(model, random_tensors(spec))


def test_quantised_rows_move_as_bytes(tmp_path: Path) -> None:
    form = FORMATS["Q4_1"]
    rows = np.random.default_rng(0).integers(0, 256, (16, form.row_bytes(32)), dtype=np.uint8)
    file = llama_file()
    index = next(i for i, tensor in enumerate(file.tensors) if tensor.name == "blk.1.attn_k.weight")
    file.tensors[index] = Tensor("blk.1.attn_k.weight", (16, 32), interleave(rows, 2).tobytes(), form.gguf_id)
    view = load_gguf(tmp_path, file).tensors["model.layers.1.self_attn.k_proj.weight"]
    assert (view.format, view.shape) == ("Q4_1", (16, 32))
    assert view.data.tobytes() == rows.tobytes()


def test_interleaving_by_hand() -> None:
    """Two heads of four rows: 0 1 | 2 3 become the pairs (0, 2), (1, 3)."""
    np.testing.assert_array_equal(interleave(np.arange(8), 2), [0, 2, 1, 3, 4, 6, 5, 7])


def test_rope_freqs(tmp_path: Path) -> None:
    file = llama_file()
    file.tensors.append(float_tensor("rope_freqs.weight", np.array([1.0, 1.0, 2.5, 8.0])))
    view = load_gguf(tmp_path, file).tensors["rope_freqs.weight"]
    np.testing.assert_array_equal(as_floats(view), [1.0, 1.0, 2.5, 8.0])
    file.tensors[-1] = float_tensor("rope_freqs.weight", np.ones(5))
    with pytest.raises(CorruptFileError, match=r"rope_freqs\.weight has shape \[5\]"):
        load_gguf(tmp_path, file)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    file = llama_file()
    file.tensors = [tensor for tensor in file.tensors if tensor.name != "blk.1.ffn_up.weight"]
    with pytest.raises(CorruptFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_gguf(tmp_path, file)
    file.tensors = file.tensors[:5]
    with pytest.raises(CorruptFileError, match=r"and \d+ more is missing"):
        load_gguf(tmp_path, file)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    file = llama_file()
    index = next(i for i, tensor in enumerate(file.tensors) if tensor.name == "blk.0.attn_k.weight")
    file.tensors[index] = float_tensor("blk.0.attn_k.weight", np.zeros((8, 32)))
    with pytest.raises(CorruptFileError, match=r"k_proj\.weight has shape \[8, 32\].*\[16, 32\]"):
        load_gguf(tmp_path, file)


def test_extra_tensors_are_noted_and_left(tmp_path: Path) -> None:
    file = llama_file()
    file.tensors += [float_tensor("v.blk.0.x", np.zeros(4)), Tensor("blk.0.new", (4,), bytes(16), type_id=39)]
    model = load_gguf(tmp_path, file)
    assert list(model.tensors) == list(expected_shapes(model.spec))
    assert model.notes == ["ignored 2 tensors that the architecture does not have: 'v.blk.0.x', 'blk.0.new'"]


@pytest.mark.parametrize(("type_id", "text"), [(39, "type 39 (MXFP4)"), (200, "type 200"), (4, "type 4")])
def test_needed_tensor_of_unknown_type(tmp_path: Path, type_id: int, text: str) -> None:
    file = llama_file()
    file.tensors[3].type_id = type_id
    with pytest.raises(UnsupportedError) as caught:
        load_gguf(tmp_path, file)
    assert text in str(caught.value)
    assert "not supported by this version" in str(caught.value)
    assert "corrupt" not in str(caught.value)


# --- directories -----------------------------------------------------------------------------------------------------


def write_directory(path: Path, spec: ModelSpec, config: dict[str, Any], drop: str = "") -> ModelFiles:
    package = pytest.importorskip("safetensors.numpy")
    tensors = {name: values for name, values in random_tensors(spec).items() if name != drop}
    package.save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return ModelFiles("tiny", path)


def test_directory(tmp_path: Path) -> None:
    config = {**TINY_CONFIG, "eos_token_id": [2, 3]}
    files = write_directory(tmp_path, tiny_spec(), config)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "top_k": 5}')
    model = load_model(files)
    assert_same(model, random_tensors(tiny_spec()))
    assert model.tokenizer_source == tmp_path
    assert model.generation_config == {"eos_token_id": [7, 2, 3], "top_k": 5}
    assert model.notes == []


def test_tied_and_untied(tmp_path: Path) -> None:
    tied = {**TINY_CONFIG, "tie_word_embeddings": True}
    model = load_model(write_directory(tmp_path, tiny_spec(tie_word_embeddings=True), tied))
    assert "lm_head.weight" not in model.tensors
    model = load_model(write_directory(tmp_path, tiny_spec(), tied))
    assert "lm_head.weight" not in model.tensors
    assert "lm_head.weight" in model.notes[0]
    files = write_directory(tmp_path, tiny_spec(), TINY_CONFIG, drop="lm_head.weight")
    with pytest.raises(CorruptFileError, match=r"lm_head\.weight is missing"):
        load_model(files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 30}, r"embed_tokens\.weight has shape \[40, 32\], but the configuration says \[30, 32\]"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight has shape \[16, 32\]"),
        ({"head_dim": 16}, r"q_proj\.weight has shape \[32, 32\]"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\..* and 8 more is missing"),
    ],
)
def test_config_and_weights_disagree(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    files = write_directory(tmp_path, tiny_spec(), {**TINY_CONFIG, **change})
    with pytest.raises(CorruptFileError, match=message):
        load_model(files)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, ModelNotFoundError, r"config\.json: no such file"),
        ("{", CorruptFileError, r"config\.json: not valid JSON"),
        ("[]", CorruptFileError, r"config\.json: must be a JSON object"),
        ("[" * 100_000, CorruptFileError, r"config\.json: not valid JSON"),
        ("\xff", CorruptFileError, r"config\.json: not valid JSON"),
    ],
)
def test_bad_config(tmp_path: Path, content: str | None, error: type[ModelError], message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(error, match=message):
        load_model(ModelFiles("tiny", tmp_path))


def test_half_precision_checkpoint_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**TINY_CONFIG)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    reference.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = load_model(ModelFiles("tiny", tmp_path))
    assert model.notes == []
    for name, values in reference.state_dict().items():
        assert model.tensors[name].format == "BF16"
        np.testing.assert_array_equal(as_floats(model.tensors[name]), values.float().numpy())


# --- dummy weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights(tmp_path: Path, name: str) -> None:
    config = {**TINY_CONFIG, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(ModelFiles("tiny", tmp_path), load_format="dummy", dummy_format=name)
    assert list(model.tensors) == list(expected_shapes(model.spec))
    for view in model.tensors.values():
        assert view.data.size == int(np.prod(view.shape[:-1])) * FORMATS[view.format].row_bytes(view.shape[-1])
    weight = model.tensors["model.layers.0.mlp.down_proj.weight"]
    values = as_floats(weight)
    assert weight.format == name
    assert abs(values.mean()) < 0.005
    assert 0.015 < values.std() < 0.025
    assert np.abs(values).max() < 0.05
    np.testing.assert_array_equal(as_floats(model.tensors["model.norm.weight"]), 1.0)


def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))

    def weights(seed: int) -> bytes:
        model = load_model(ModelFiles("tiny", tmp_path), load_format="dummy", dummy_format="Q8_0", seed=seed)
        return b"".join(view.data.tobytes() for view in model.tensors.values())

    assert weights(1) == weights(1)
    assert weights(1) != weights(2)


def test_dummy_falls_back_where_rows_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIG, "intermediate_size": 40}))
    model = load_model(ModelFiles("tiny", tmp_path), load_format="dummy", dummy_format="Q4_K")
    assert model.tensors["model.layers.0.mlp.up_proj.weight"].format == "Q8_0"
    assert model.tensors["model.layers.0.mlp.down_proj.weight"].format == "F16"
    assert model.notes[1] == "F16 and Q8_0 where rows do not fit Q4_K"


def test_dummy_from_a_gguf_configuration(tmp_path: Path) -> None:
    model = load_gguf(tmp_path, llama_file(), load_format="dummy")
    assert model.spec == tiny_spec(rms_norm_eps=float(np.float32(1e-5)))
    assert {view.source for view in model.tensors.values()} == {"random weights"}


def test_wrong_load_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--load-format: 'pt'"):
        load_gguf(tmp_path, llama_file(), load_format="pt")
    with pytest.raises(ConfigError, match="is a GGUF file"):
        load_gguf(tmp_path, llama_file(), load_format="safetensors")
    with pytest.raises(ConfigError, match="format 'Q9'"):
        load_gguf(tmp_path, llama_file(), load_format="dummy", dummy_format="Q9")
    with pytest.raises(ConfigError, match="without a GGUF file"):
        load_model(ModelFiles("tiny", tmp_path), load_format="gguf")
