"""Tiny random models of every architecture: log-probabilities equal those of transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ops.native_ops import ROUNDING
from support.gguf_writer import model_file

from octavo import _native
from octavo.backends.cpu.backend import CpuBackend, inverse_frequencies, rope_table
from octavo.models.loading import LoadedModel, load_model
from octavo.plan import PlanRow, SampleSpec, StepPlan
from octavo.request import SamplingParams
from octavo.weights.hub import resolve_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 48
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "initializer_range": 0.3,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("LlamaConfig", {"rope_parameters": LINEAR_ROPE}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 24}),
    "mistral-full": ("MistralConfig", {"sliding_window": None}),
    **{f"mistral-window-{w}": ("MistralConfig", {"sliding_window": w}) for w in (1, 8, 15, 16, 17, 500)},
    "qwen2": ("Qwen2Config", {}),
    "qwen2-mixed-windows": (
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 12}),
}  # fmt: skip


def tiny(name: str, **changes: Any) -> Any:
    kind, extra = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**COMMON, **extra, **changes})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # biases and norms start as 0 and 1: make them count
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
    return model.eval()


def oracle(model: Any, token_ids: list[int]) -> np.ndarray:
    """Log-probabilities after each position: [tokens, vocab]."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1).numpy()


def load(path: Path) -> LoadedModel:
    return load_model(resolve_model(str(path)))


def new_backend(loaded: LoadedModel, isa: str = "auto") -> CpuBackend:
    backend = CpuBackend(
        loaded,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_model_len=512,
        isa=isa,
        kv_cache_dtype="float32",
        poison=True,
    )
    backend.allocate_kv(40)
    return backend


def ours(backend: CpuBackend, token_ids: list[int], *, chunks: list[int]) -> np.ndarray:
    """The same through the backend, the text given in chunks of these sizes (the last repeats)."""
    rng = np.random.default_rng(1)
    blocks = rng.permutation(40).tolist()
    out = np.full((len(token_ids), VOCAB), np.nan)
    start, sizes = 0, list(chunks)
    while start < len(token_ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        part = token_ids[start : start + size]
        row = PlanRow(part, start, blocks, score_ids=[0] * len(part), num_scores=VOCAB)
        for i, score in enumerate(backend.execute(StepPlan((row,))).rows[0].scores):
            for token_id, logprob in score.top:
                out[start + i, token_id] = logprob
        start += len(part)
    return out


TEXT = np.random.default_rng(7).integers(0, VOCAB, 90).tolist()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    """Prefill in one go, in chunks, and token by token (C164: windows are the same on all paths)."""
    model = tiny(name)
    model.save_pretrained(tmp_path)
    want = oracle(model, TEXT)
    backend = new_backend(load(tmp_path))
    whole = ours(backend, TEXT, chunks=[90])
    np.testing.assert_allclose(whole, want, atol=2e-4)
    np.testing.assert_array_equal(ours(backend, TEXT, chunks=[20, 1]), whole)
    np.testing.assert_array_equal(ours(backend, TEXT, chunks=[7, 33]), whole)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights(isa: str, dtype: str, tmp_path: Path) -> None:
    """Sharded half-precision checkpoints; the oracle runs in float32 on the rounded weights."""
    model = tiny("llama").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    # Read back rather than cast: a cast would leave the rotary frequencies rounded to half precision.
    reread = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    want = oracle(reread.eval(), TEXT)
    got = ours(new_backend(load(tmp_path), isa), TEXT, chunks=[90])
    # bf16 products round each activation to 8 bits; float32 ones are exact on half-precision weights.
    rounded = ROUNDING[isa] > 0 and dtype == "bfloat16"
    error = np.abs(got - want)
    assert error.mean() < (0.05 if rounded else 1e-5)
    assert error.max() < (0.6 if rounded else 2e-4)


@pytest.mark.parametrize(("architecture", "name"), [("llama", "llama"), ("qwen2", "qwen2")])
def test_gguf_equals_transformers(architecture: str, name: str, tmp_path: Path) -> None:
    """C146: the rows of q and k that a llama GGUF file interleaves are put back; qwen2 has none."""
    model = tiny(name)
    sizes = {"num_layers": 3, "hidden": 40, "inner": 56, "heads": 4, "kv_heads": 2, "context": 512}
    tensors = {n: p.detach().numpy() for n, p in model.named_parameters()}
    metadata = {f"{architecture}.vocab_size": VOCAB}
    path = model_file(architecture, tensors, sizes, metadata).write(tmp_path / "tiny.gguf")
    backend = new_backend(load(path))
    np.testing.assert_allclose(ours(backend, TEXT, chunks=[90]), oracle(model, TEXT), atol=2e-4)


def test_llama3_rope_at_long_positions(tmp_path: Path) -> None:
    """C161: logits far beyond the original context equal transformers'."""
    model = tiny("llama-llama3-rope", max_position_embeddings=4096)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    np.testing.assert_allclose(inverse_frequencies(loaded.spec), model.model.rotary_emb.inv_freq.numpy(), rtol=2e-7)
    text = np.random.default_rng(8).integers(0, VOCAB, 3100).tolist()
    backend = CpuBackend(
        loaded, max_num_seqs=1, max_num_batched_tokens=3100, max_model_len=3200, kv_cache_dtype="float32", threads=2
    )
    backend.allocate_kv(200)
    row = PlanRow(
        text, 0, list(range(200)), SampleSpec(SamplingParams(temperature=0, logprobs=20), 0, 0, 3100, text, 3100)
    )
    result = backend.execute(StepPlan((row,))).rows[0]
    assert result.logprobs is not None
    want = oracle(model, text)[-1]
    for token_id, logprob in result.logprobs.top:
        assert logprob == pytest.approx(want[token_id], abs=1e-3)


def test_rope_factors_divide_frequencies(tmp_path: Path) -> None:
    """C145: a GGUF file's rope_freqs.weight gives the same angles as the llama3 rule it was made from."""
    model = tiny("llama-llama3-rope")
    plain = tiny("llama").model.rotary_emb.inv_freq.numpy()
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    tensors = {n: p.detach().numpy() for n, p in model.named_parameters()}
    sizes = {"num_layers": 3, "hidden": 40, "inner": 56, "heads": 4, "kv_heads": 2, "context": 512}
    file = model_file("llama", tensors, sizes, {"llama.vocab_size": VOCAB})
    from support.gguf_writer import float_tensor

    file.tensors.append(float_tensor("rope_freqs.weight", factors))
    loaded = load(file.write(tmp_path / "tiny.gguf"))
    cos, _ = rope_table(loaded.spec, factors, 512)
    exact = np.cos(np.arange(512)[:, None] * model.model.rotary_emb.inv_freq.numpy().astype(np.float64)[None, :])
    np.testing.assert_allclose(cos[[1, 500]], exact[[1, 500]], atol=5e-5)
    np.testing.assert_allclose(ours(new_backend(loaded), TEXT, chunks=[90]), oracle(model, TEXT), atol=2e-4)


def test_nan_in_one_row_leaves_the_others_alone(tmp_path: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("nan")
    model.save_pretrained(tmp_path)
    backend = new_backend(load(tmp_path))
    greedy = SamplingParams(temperature=0, logprobs=2)

    def row(ids: list[int], block: int) -> PlanRow:
        return PlanRow(ids, 0, [block], SampleSpec(greedy, 0, 0, len(ids), ids, len(ids)))

    good, bad, after = backend.execute(StepPlan((row([1, 2, 3], 0), row([1, 5], 1), row([4], 2)))).rows
    assert bad.error is not None
    assert bad.token_id is None
    (alone,) = backend.execute(StepPlan((row([1, 2, 3], 3),))).rows
    assert good == alone
    assert after.token_id is not None
