"""The CPU backend: one native op program, replayed in one call per step without the GIL."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.backends.base import Capabilities
from octavo.backends.cpu.pooling import Pooler
from octavo.backends.cpu.recorder import Recorder
from octavo.backends.cpu.weights import NativeWeights, floats
from octavo.backends.inputs import flatten, unflatten
from octavo.errors import ConfigError, UnsupportedError
from octavo.models import forward_of
from octavo.models.loading import LoadedModel
from octavo.models.spec import ModelSpec
from octavo.plan import StepPlan, StepResult

NATIVE_BLOCK_SIZE = 16  # kBlockTokens in csrc/kernels.h
ROPE_CHUNK = 1024
KV_DTYPES = ("bfloat16", "float32", "int8")


class CpuBackend:
    """Implements octavo.backends.base.Backend."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int = NATIVE_BLOCK_SIZE,
        threads: int = 1,
        pins: Sequence[Sequence[int]] = (),
        isa: str = "auto",
        kv_cache_dtype: str = "bfloat16",
        poison: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        if block_size != NATIVE_BLOCK_SIZE:
            raise ConfigError(f"--block-size: the CPU kernels take {NATIVE_BLOCK_SIZE}, not {block_size}")
        if kv_cache_dtype not in KV_DTYPES:
            raise ConfigError(f"--kv-cache-dtype: {kv_cache_dtype!r} is none of {', '.join(KV_DTYPES)}")
        check_isa(isa)
        spec = model.spec
        if spec.head_dim % 2:
            raise UnsupportedError(f"head_dim {spec.head_dim}: rotary embedding needs an even number")
        self._spec = spec
        self._poison = poison
        # Prompt scoring wants a row of logits for every token of a chunk.
        max_outputs = max(max_num_seqs, max_num_batched_tokens)
        self._program = _native.Program(isa, threads, max_num_batched_tokens, max_outputs)
        if pins:
            self._program.pin_workers([list(cpus) for cpus in pins[1:]])
        self._program.set_rope(*rope_table(spec, _rope_factors(model), max_model_len))
        self._program.set_kv_shape(spec.num_layers, spec.num_kv_heads, spec.head_dim, kv_cache_dtype)
        total = sum(t.data.nbytes for t in model.tensors.values()) or 1
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(min(1.0, done / total))

        recorder = Recorder(NativeWeights(self._program, model.tensors, advance), spec.head_dim)
        recorder.sample(forward_of(spec.architecture)(recorder, recorder.weights, spec))
        buffers = recorder.build(self._program)
        hidden = self._program.buffer(buffers[recorder.gathered.storage])
        self._pooler = Pooler(hidden, floats(model.tensors["model.norm.weight"]), spec.rms_norm_eps)
        self._capabilities = Capabilities(
            name=f"cpu ({self._program.isa}, {threads} threads)",
            vocab_size=spec.vocab_size,
            weight_bytes=self._program.weight_bytes,
            kv_bytes_per_block=self._program.kv_bytes_per_block,
            details=_details(self._program.isa, threads, kv_cache_dtype, {t.format for t in model.tensors.values()}),
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def op_seconds(self) -> dict[str, float]:
        """Wall time spent in each kind of op so far, in seconds."""
        return dict(self._program.op_seconds)

    def allocate_kv(self, num_blocks: int) -> None:
        self._program.allocate_kv(num_blocks, self._poison)

    def execute(self, plan: StepPlan) -> StepResult:
        pools = any(row.pool is not None for row in plan.rows)
        arrays = self._program.execute(self._spec.vocab_size, *flatten(plan), all_rows=pools)
        result = unflatten(plan, arrays)
        return self._pooler.pooled(plan, result) if pools else result

    def close(self) -> None:
        del self._program, self._pooler


def check_isa(isa: str) -> None:
    """Raise ConfigError unless this machine has kernels of that name."""
    if isa == "auto" or isa in _native.available_isas():
        return
    if isa in _native.known_isas():
        raise ConfigError(f"--isa: this machine lacks {isa}; it has {', '.join(_native.available_isas())}")
    raise ConfigError(f"--isa: {isa!r} is none of auto, {', '.join(_native.known_isas())}")


def rope_table(
    spec: ModelSpec, factors: npt.NDArray[np.float32] | None, max_positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin of every position and frequency: float32 [max_positions, head_dim / 2].

    Angles are float32 products, as transformers computes them; their cosines are rounded from float64.
    """
    inv_freq = inverse_frequencies(spec, factors)
    cos = np.empty((max_positions, inv_freq.size), dtype=np.float32)
    sin = np.empty_like(cos)
    for start in range(0, max_positions, ROPE_CHUNK):
        positions = np.arange(start, min(start + ROPE_CHUNK, max_positions), dtype=np.float32)
        angles = (positions[:, None] * inv_freq[None, :]).astype(np.float64)
        cos[start : start + ROPE_CHUNK] = np.cos(angles)
        sin[start : start + ROPE_CHUNK] = np.sin(angles)
    return cos, sin


def inverse_frequencies(spec: ModelSpec, factors: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
    """Rotary frequencies, float32 [head_dim / 2]. `factors` (from a GGUF file) divide them.

    The llama3 rule is that of transformers: wavelengths above original / low_freq_factor are stretched by
    `factor`, those below original / high_freq_factor kept, those between interpolated.
    """
    exponent = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    # Powers are rounded from float64: numpy's float32 ones differ in the last bit from one processor to another.
    powers = np.power(float(spec.rope_theta), exponent.astype(np.float64)).astype(np.float32)
    inv_freq = np.asarray(np.float32(1.0) / powers, dtype=np.float32)
    scaling = spec.rope_scaling
    if factors is not None:
        return np.asarray(inv_freq / factors, dtype=np.float32)
    if scaling.kind == "linear":
        return np.asarray(inv_freq / np.float32(scaling.factor), dtype=np.float32)
    if scaling.kind == "llama3":
        wavelength = 2 * np.pi / inv_freq.astype(np.float64)
        low = scaling.original_max_position / scaling.low_freq_factor
        high = scaling.original_max_position / scaling.high_freq_factor
        smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        between = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
        scaled = np.where(wavelength > low, inv_freq / scaling.factor, np.where(wavelength < high, inv_freq, between))
        return np.asarray(scaled, dtype=np.float32)
    return inv_freq


def _rope_factors(model: LoadedModel) -> npt.NDArray[np.float32] | None:
    tensor = model.tensors.get("rope_freqs.weight")
    return None if tensor is None else floats(tensor)


_F32 = "float32 fused multiply-add"
_INT8 = "8-bit products (a step per 32 activations, outliers in float32), float32 sums"
_BF16 = "bf16 dot product, float32 sums"
# What each instruction set multiplies quantised and bf16 matrices with; float32 where it has no entry.
_PRODUCTS = {
    "avx2": (_INT8, _F32),
    "avx512_bf16": (_BF16, _BF16),
    "avx512_vnni": (_INT8, _F32),
    "avx512_vnni_bf16": (_INT8, _BF16),
    "amx": ("AMX bf16 tiles, float32 sums", "AMX bf16 tiles, float32 sums"),
}
_ATTENTION = {"avx512_vnni_bf16": "bf16 dot product", "amx": "AMX bf16 tiles"}  # over a bf16 cache


def _details(isa: str, threads: int, kv_cache_dtype: str, formats: set[str]) -> dict[str, str]:
    attention = _ATTENTION.get(isa, "float32") if kv_cache_dtype == "bfloat16" else "float32"
    linear = []
    for name in sorted(formats):
        product = _F32
        if isa in _PRODUCTS and name not in ("F32", "F16"):
            product = _PRODUCTS[isa][name == "BF16"]
        linear.append(f"{name}: {product}")
    return {
        "instruction set": isa,
        "threads": str(threads),
        "linear": "; ".join(linear),
        "attention": f"{attention} over {kv_cache_dtype} KV, pieces of 64 tokens",
        "norms, rope, activation": f"float32, {isa}",
        "sampler": f"float32, {isa}",
    }
