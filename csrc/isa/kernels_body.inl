// The body of one instruction set's translation unit; the including file opened its namespace.
// clang-format off: each include builds on the ones before it.
#include "../impl/vec.h"
#include "../impl/tiles.inl"
#include "../impl/elementwise.inl"
#include "../impl/gemm_f32.inl"
#if defined(OCTAVO_ISA_AMX)
#include "../impl/gemm_amx.inl"
#else
#if defined(OCTAVO_ISA_BF16)
#include "../impl/gemm_bf16.inl"
#endif
#if defined(OCTAVO_ISA_VNNI) || defined(OCTAVO_ISA_AVX2)
#include "../impl/prepare_int8.inl"
#include "../impl/gemm_int8.inl"
#elif !defined(OCTAVO_ISA_BF16)
static Preparation preparation(const PackedMatrix&) { return kAsFloat; }
static void prepare_row(const float*, int, int, uint16_t*, float*) {}
static void linear(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  linear_f32(a, panel_begin, panel_end, scratch);
}
static size_t linear_scratch_bytes(int k) { return (size_t)k * 64; }
#endif
#endif
#if defined(OCTAVO_ISA_AMX) || defined(OCTAVO_ISA_VNNI) && defined(OCTAVO_ISA_BF16)
#define OCTAVO_BF16_ATTENTION 1
#endif
#include "../impl/attention.inl"
#if defined(OCTAVO_BF16_ATTENTION)
#include "../impl/attention_pairs.inl"
#endif
#include "../impl/sampler.inl"
// clang-format on

#if defined(OCTAVO_ISA_VNNI) || defined(OCTAVO_ISA_AVX2)
static constexpr EightBits kEightBits = EightBits::kQuads;
#if defined(OCTAVO_ISA_BF16)
static constexpr int kPreparedValueBytes = 4;  // bf16, and a line for 32 in int8
#else
static constexpr int kPreparedValueBytes = 2;  // a line for 32 in int8
#endif
static constexpr auto kGatherLarge = gather_large;
#else
static constexpr EightBits kEightBits = EightBits::kPairs;
static constexpr int kPreparedValueBytes = 2;
static constexpr decltype(Kernels::gather_large) kGatherLarge = nullptr;
#endif

// In 8-bit products a block of rows costs little more than reading the weights again, and stays in the second cache.
// Others unpack a panel for all rows.
static constexpr int kRowBlock = kEightBits == EightBits::kQuads ? 64 : 1 << 30;

// clang-format off
static const Kernels kKernels = {
    OCTAVO_ISA_NAME,
    kEightBits,
    kPreparedValueBytes,
    kRowBlock,
    preparation,
    prepare_row,
    kGatherLarge,
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
    merge_spans,
    sample_row,
};
// clang-format on
