// The body of one instruction set's translation unit; the including file opened its namespace.
// clang-format off: each include builds on the ones before it.
#include "../impl/vec.h"
#include "../impl/elementwise.inl"
#include "../impl/gemm_f32.inl"
#if defined(OCTAVO_ISA_AMX)
#include "../impl/gemm_amx.inl"
#elif defined(OCTAVO_ISA_BF16)
#include "../impl/gemm_bf16.inl"
#else
static bool wants_prepared(const PackedMatrix&) { return false; }
static void prepare_row(const float*, int, uint16_t*, float*) {}
static void linear(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  linear_f32(a, panel_begin, panel_end, scratch);
}
static size_t linear_scratch_bytes(int k) { return (size_t)k * 64; }
#endif
#include "../impl/attention.inl"
#if defined(OCTAVO_ISA_AMX)
#include "../impl/attention_amx.inl"
#endif
#include "../impl/sampler.inl"
// clang-format on

static const Kernels kKernels = {
    OCTAVO_ISA_NAME,
    wants_prepared,
    prepare_row,
    linear_scratch_bytes,
    linear,
    unpack_panel,
    rms_norm,
    add_rms_norm,
    add,
    rope,
    silu_mul,
    store_kv,
    attention_scratch_bytes,
    attention,
    sample_row,
};
