"""The parts that decoder-only transformers share: attention, gated MLP, and the stack of both."""

from __future__ import annotations

from typing import TypeVar

from octavo.models.spec import ModelSpec
from octavo.ops.contract import Ops, Weights

T = TypeVar("T")
M = TypeVar("M")
V = TypeVar("V")


def attention(ops: Ops[T, M, V], w: Weights[M, V], spec: ModelSpec, layer: int, x: T) -> T:
    """Grouped-query attention with rotary positions over the paged KV cache. x: [tokens, hidden]."""
    name = f"model.layers.{layer}.self_attn."
    projections = [name + p for p in ("q_proj", "k_proj", "v_proj")]
    bias = w.vector(*(p + ".bias" for p in projections)) if spec.attention_bias else None
    qkv = ops.linear(x, [w.matrix(p + ".weight") for p in projections], bias)
    kv_width = spec.num_kv_heads * spec.head_dim
    q, k, v = ops.split(qkv, [spec.num_heads * spec.head_dim, kv_width, kv_width])
    if spec.qk_norm:
        q = ops.head_norm(q, w.vector(name + "q_norm.weight"), spec.rms_norm_eps)
        k = ops.head_norm(k, w.vector(name + "k_norm.weight"), spec.rms_norm_eps)
    q, k = ops.rope(q), ops.rope(k)
    heads = ops.attention(q, k, v, layer=layer, window=spec.window(layer))
    out_bias = w.vector(name + "o_proj.bias") if spec.attention_out_bias else None
    return ops.linear(heads, [w.matrix(name + "o_proj.weight")], out_bias)


def gated_mlp(ops: Ops[T, M, V], w: Weights[M, V], spec: ModelSpec, layer: int, x: T) -> T:
    """down(silu(gate(x)) * up(x)). x: [tokens, hidden]."""
    name = f"model.layers.{layer}.mlp."
    up_bias = w.vector(name + "gate_proj.bias", name + "up_proj.bias") if spec.mlp_bias else None
    inner = ops.gated_linear(x, w.matrix(name + "gate_proj.weight"), w.matrix(name + "up_proj.weight"), up_bias)
    down_bias = w.vector(name + "down_proj.bias") if spec.mlp_bias else None
    return ops.linear(inner, [w.matrix(name + "down_proj.weight")], down_bias)


def decoder(ops: Ops[T, M, V], w: Weights[M, V], spec: ModelSpec) -> T:
    """The whole pre-norm decoder: token ids in, logits of the wanted rows out, [outputs, vocab]."""
    x = ops.embedding(w.table("model.embed_tokens.weight"))
    delta: T | None = None  # what the previous block adds to x; added together with the next norm
    for layer in range(spec.num_layers):
        name = f"model.layers.{layer}."
        norm = w.vector(name + "input_layernorm.weight")
        if delta is None:
            normed = ops.rms_norm(x, norm, spec.rms_norm_eps)
        else:
            x, normed = ops.add_rms_norm(x, delta, norm, spec.rms_norm_eps)
        delta = attention(ops, w, spec, layer, normed)
        norm = w.vector(name + "post_attention_layernorm.weight")
        x, normed = ops.add_rms_norm(x, delta, norm, spec.rms_norm_eps)
        delta = gated_mlp(ops, w, spec, layer, normed)
    if delta is not None:
        x = ops.add(x, delta)
    last = ops.rms_norm(ops.gather(x), w.vector("model.norm.weight"), spec.rms_norm_eps)
    head = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    return ops.linear(last, [w.matrix(head)])
