// The kernels of one instruction set, as a table of functions over raw pointers. All checks are done by the
// callers (program.cpp, execute.cpp, bind.cpp). Rows are row-major floats with a stride in elements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "formats.h"
#include "sampler.h"

namespace octavo {

constexpr int kBlockTokens = 16;  // tokens in a KV block: one vector of kernels' scores

// What kernels make of a row before it meets a matrix, as bits: nothing, its values in bf16, its values in 8 bits.
enum Preparation : int { kAsFloat = 0, kAsBf16 = 1, kAsInt8 = 2 };

// Values of a block of rows that are too large for the rows' bytes, by row, then by k. Rows have most of them in the
// same few channels, whose weights are made ready once for all.
struct LargeValue {
  int32_t row, channel;  // channels[channel] is its k
  float value;
};
struct LargeValues {
  const LargeValue* values;
  const int32_t* channels;
  int num_values, num_channels;
};

// y[rows][n] = x[rows][k] . w^T + bias. Kernels that multiply in bf16 or in 8 bits read `prepared` and `sums`, made by
// prepare_row; the others read `x`.
struct LinearArgs {
  const PackedMatrix* w;
  const float* bias;  // [n] or null
  const float* x;
  int64_t ldx;
  const uint16_t* prepared;  // [rows]: bf16 [K32], K32 = k rounded up to 32, zero padded; then, where kernels multiply
  int64_t ld_prepared;       // in 8 bits, Quant [K32 / 32] (prepare_int8.inl). A multiple of 64 bytes
  const float* sums;         // [rows]; bf16: sums of 16 consecutive prepared values (K32 / 16 of them), then, from
  int64_t ld_sums;           // offset32 on, of 32 (K32 / 32); int8: RowRest (prepare_int8.inl)
  int64_t offset32;
  LargeValues large;
  float* y;
  int64_t ldy;
  int first_panel;  // the panel whose columns start at y
  int rows;
};

// Causal attention of a tile of query tokens of one sequence over one KV head.
// KV of block b lies at kv + b * block_stride, in the kernels' own layout (see store_kv).
struct AttentionTask {
  const float* q;  // [num_tokens][>= group * head_dim] at the first query head of this KV head
  int64_t ldq;
  float* out;
  int64_t ldo;
  const uint8_t* kv;
  size_t block_stride;
  const int32_t* block_ids;
  int num_tokens;
  int group;      // query heads that share the KV head
  int first_pos;  // position of the first query token
  int window;     // keys visible to a query, itself included; 0: all
  int head_dim;
  float scale;
  int span;       // only this one, its state left in `states`; -1: all of them, merged, into `out`
  float* states;  // [spans from first_span on][state_floats]
  // What this thread will probably attend to next: kernels that wait for memory ask for its beginning. next_kv null:
  // nothing.
  const uint8_t* next_kv;
  const int32_t* next_block_ids;
  int next_first_pos, next_last_pos;
};

constexpr int kTileTokens = 16;  // most query tokens in an AttentionTask

// Keys at positions [256 i, 256 i + 256) are a span. Each is attended to on its own, and the spans that a query sees
// are merged in order, by whichever thread: long contexts can be shared out, and a result depends on nothing but the
// query's position and context.
constexpr int kSpanTokens = 256;
// The first key that the query at `position` sees.
inline int first_seen(int position, int window) { return window > 0 && position >= window ? position - window + 1 : 0; }
inline int first_span(const AttentionTask& t) { return first_seen(t.first_pos, t.window) / kSpanTokens; }
inline int last_span(const AttentionTask& t) { return (t.first_pos + t.num_tokens - 1) / kSpanTokens; }

// Floats of what `rows` queries have gathered from a span: their maxima, sums and outputs.
inline size_t state_floats(int rows, int head_dim) { return (size_t)rows * (2 + (size_t)padded16(head_dim)); }

enum class KvType : int32_t { kBf16, kF32, kInt8 };  // of the cache

struct Kernels {
  const char* isa;

  EightBits eight_bits;      // how 8-bit integers of weights must be packed
  int prepared_value_bytes;  // bytes of a prepared value in all its shapes
  int row_block;             // most rows that `linear` should be given at once
  // What `linear` wants to find in the prepared rows for this matrix.
  Preparation (*preparation)(const PackedMatrix& w);
  // `preparation`: of all matrices that the row will meet, or-ed.
  void (*prepare_row)(const float* x, int k, int preparation, uint16_t* prepared, float* sums);
  // Gathers the large values of prepared rows into `values` and `channels`; channel_of[k] is -1 for all k, before and
  // after. Null where prepared rows have none.
  LargeValues (*gather_large)(const float* sums, int64_t ld_sums, int rows, LargeValue* values, int32_t* channels,
                              int32_t* channel_of);
  size_t (*linear_scratch_bytes)(int k);
  void (*linear)(const LinearArgs& args, int panel_begin, int panel_end, void* scratch);
  // Floats of one panel as the kernels see them, [k][16].
  void (*unpack_panel)(const PackedMatrix& w, int panel, float* out);

  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y);
  // x += delta, then y = rms_norm(x).
  void (*add_rms_norm)(float* x, const float* delta, const float* weight, int n, float eps, float* y);
  void (*add)(float* x, const float* delta, int n);
  // Rotates `heads` heads in place, halves paired (i, i + head_dim / 2).
  void (*rope)(float* x, int heads, int head_dim, const float* cos, const float* sin);
  void (*silu_mul)(const float* gate, const float* up, int n, float* y);

  // kv: of the block and head; offset: token's place in the block.
  void (*store_kv)(const float* k, const float* v, int head_dim, KvType type, uint8_t* kv, int offset);
  size_t (*attention_scratch_bytes)(int group, int head_dim);
  void (*attention)(const AttentionTask& task, KvType type, void* scratch);
  // Merges the states of all spans of a task into `out`.
  void (*merge_spans)(const AttentionTask& task);

  void (*sample_row)(const float* logits, const SampleRow& row, SampleOut* out, int32_t* top_ids, float* top_logprobs,
                     void* scratch);
};

// Large values of a row of k values: each exceeds five times the root mean square, so 25 of them make more than k.
inline int64_t large_per_row(int k) { return k / 25 + 1; }

// Floats that prepare_row has room for in `sums` for a row of k values: three for each 32 of them (bf16), or two and
// two for each large one (int8).
inline int64_t sums_per_row(int k) { return std::max(((int64_t)k + 31) / 32 * 3, 2 + 2 * large_per_row(k)); }

// Bytes of one block's keys and values of one head. Kernels lay them out as they like within: keys take
// head_dim rounded up to 32 values per token, values head_dim rounded up to 16. In 8 bits, keys and values of a token
// have a bf16 scale each.
inline size_t kv_block_head_bytes(int head_dim, KvType type) {
  const size_t keys = (size_t)padded32(head_dim), values = (size_t)padded16(head_dim);
  if (type == KvType::kInt8) return kBlockTokens * (keys + values + 4);
  return kBlockTokens * (keys + values) * (type == KvType::kF32 ? 4 : 2);
}

// Kernels by name ("scalar", "avx512", "avx2", "avx512_bf16", "avx512_vnni", "avx512_vnni_bf16", "amx"); null where the
// name is unknown or the machine lacks the instructions. best_isa() is the last that the machine has.
const Kernels* kernels_for(const char* isa);
const char* const* known_isas();  // null-terminated
const char* best_isa();

}  // namespace octavo
