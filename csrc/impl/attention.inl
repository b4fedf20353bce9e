// Paged attention, online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) over pieces of 64 tokens, whose
// results are merged span by span.
//
// Pieces lie at fixed positions 0, 64, 128, ... of the sequence and are taken in that order, four to a span, so the
// result of a query depends on its position and context alone, not on the tile it is computed in (law 1). Keys a
// query may not see get weight exactly 0, and a piece it sees nothing of is skipped for that query.

static constexpr int kPieceTokens = 64;
static constexpr int kPieceBlocks = kPieceTokens / 16;
static constexpr float kLn2 = 0.693147180559945309f;  // scores are in units of it: weights are powers of two
// Rows at once, and for so many rows the key blocks or chunks of 16 value columns at once: in 32 registers of 16 floats
// 4 x 4 sums; in 16 of 8 floats 6 x 1 or 3 x 2, of two registers each.
#if defined(OCTAVO_ISA_AVX512)
static constexpr int kRowsAtOnce = 4;
static constexpr int columns_at_once(int) { return 4; }
#else
static constexpr int kRowsAtOnce = 6;
static constexpr int columns_at_once(int rows) { return rows <= 3 ? 2 : 1; }
#endif

// How each type of cache is read: 16 values with their lanes in the order that costs least. From then on a lane is
// computed on its own; in_order() sorts the sums once, and as_loaded() is its inverse.
struct InOrder {
  static inline V16 in_order(V16 x) { return x; }
  static inline V16 as_loaded(V16 x) { return x; }
};
#if defined(OCTAVO_ISA_AVX2)
struct alignas(32) Mask {
  uint32_t lanes[8];
};
static constexpr uint32_t kUpper = 0xffff0000u;
static constexpr Mask kUpperHalves = {{kUpper, kUpper, kUpper, kUpper, kUpper, kUpper, kUpper, kUpper}};
struct Bf16Cache {
  using T = uint16_t;
  static inline T from(float x) { return float_to_bf16(x); }
  // Every second lane is a shift away, the others a mask: half the operations of widening them in order. The mask
  // stays in memory, since score_few() has no register for it.
  static inline __m256 load_half(const T* p, int odd) {
    __m256i w = _mm256_loadu_si256((const __m256i*)p);
    if (!odd) return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
    asm("vpand %1, %0, %0" : "+x"(w) : "m"(kUpperHalves));
    return _mm256_castsi256_ps(w);
  }
  static inline V16 load(const T* p) { return {load_half(p, 0), load_half(p, 1)}; }
  static inline V16 in_order(V16 x) { return interleave(x); }
  static inline V16 as_loaded(V16 x) { return deinterleave(x); }
};
#else
struct Bf16Cache : InOrder {
  using T = uint16_t;
  static inline T from(float x) { return float_to_bf16(x); }
  static inline V16 load(const T* p) { return load_bf16(p); }
};
#endif
struct F32Cache : InOrder {
  using T = float;
  static inline T from(float x) { return x; }
  static inline V16 load(const T* p) { return V16::load(p); }
#if defined(OCTAVO_ISA_AVX2)
  static inline __m256 load_half(const T* p, int upper) { return _mm256_loadu_ps(p + upper * 8); }
#endif
};

// Signed bytes; the scales of a block's 16 keys, then of its 16 values, lie behind them in bf16.
struct Int8Cache : InOrder {
  using T = int8_t;
  static inline V16 load(const T* p) { return load_i8(p); }
#if defined(OCTAVO_ISA_AVX2)
  static inline __m256 load_half(const T* p, int upper) { return i8_half(p + upper * 8); }
#endif
};

template <class Cache>
static inline const uint16_t* scales_of(const typename Cache::T* keys, int head_dim) {
  const size_t key_bytes = (size_t)padded32(head_dim), value_bytes = (size_t)padded16(head_dim);
  return (const uint16_t*)(keys + kBlockTokens * (key_bytes + value_bytes));
}

template <class Cache>
static void store_kv_as(const float* k, const float* v, int head_dim, uint8_t* kv, int offset) {
  using T = typename Cache::T;
  const int padded = padded16(head_dim);
  T* keys = (T*)kv;
  T* values = keys + (size_t)head_dim * 16 + (size_t)offset * padded;
  for (int d = 0; d < head_dim; ++d) keys[(size_t)d * 16 + offset] = Cache::from(k[d]);
  for (int d = 0; d < head_dim; ++d) values[d] = Cache::from(v[d]);
}

// Writes x as bytes `stride` apart, and returns the bf16 bits of their scale: largest magnitude / 127, rounded up so
// that no byte is beyond 127.
static inline uint16_t store_bytes(const float* x, int n, int8_t* out, int stride) {
  float high = 0.0f;
  for (int d = 0; d < n; ++d) high = std::fabs(x[d]) > high ? std::fabs(x[d]) : high;
  const float wanted = high / 127.0f;
  uint32_t bits;
  memcpy(&bits, &wanted, 4);
  bits = (bits + 0xffffu) & 0xffff0000u;
  float scale;
  memcpy(&scale, &bits, 4);
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int d = 0; d < n; ++d) out[(size_t)d * stride] = (int8_t)std::lrintf(x[d] * inverse);
  return (uint16_t)(bits >> 16);
}

template <>
void store_kv_as<Int8Cache>(const float* k, const float* v, int head_dim, uint8_t* kv, int offset) {
  int8_t* keys = (int8_t*)kv;
  int8_t* values = keys + (size_t)head_dim * 16 + (size_t)offset * padded16(head_dim);
  uint16_t* scales = (uint16_t*)scales_of<Int8Cache>(keys, head_dim);
  scales[offset] = store_bytes(k, head_dim, keys + offset, 16);
  scales[kBlockTokens + offset] = store_bytes(v, head_dim, values, 1);
}

// Blocks lie anywhere, so the hardware cannot foresee the next piece. While a decode step, which waits for memory,
// loads one piece, it asks for the same place of the next (kPrefetch), into the second cache, whose queue of misses is
// longer than that of the first. (always_inline: GCC 12 takes a function that only prefetches for one without effect,
// and may drop calls of it.)
template <bool kPrefetch>
__attribute__((always_inline)) static inline void ask_for(const uint8_t* place) {
  if constexpr (kPrefetch) _mm_prefetch((const char*)place, _MM_HINT_T1);
}

#if defined(OCTAVO_ISA_AVX2)
#include "attention_avx2.inl"
#endif

// scores[r][16 b + t] = q[r] . key(t of block b), summed over d in order.
template <class Cache, int kRows, int kBlocks, bool kPrefetch>
static inline void score_blocks(const float* q, int head_dim, const uint8_t* const* keys, const uint8_t* const* next,
                                float* scores) {
#if defined(OCTAVO_ISA_AVX2)
  if constexpr (kRows <= 3) return score_few<Cache, kRows, kBlocks, kPrefetch>(q, head_dim, keys, next, scores);
#endif
  using T = typename Cache::T;
  V16 acc[kRows][kBlocks];
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) acc[r][b] = V16::zero();
  for (int d = 0; d < head_dim; ++d) {
    const size_t at = (size_t)d * 16 * sizeof(T);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      if (at % 64 == 0) ask_for<kPrefetch>(next[b] + at);
      const V16 key = Cache::load((const T*)(keys[b] + at));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[r][b] = fma(V16::set1(q[(size_t)r * head_dim + d]), key, acc[r][b]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) Cache::in_order(acc[r][b]).store(scores + (size_t)r * kPieceTokens + b * 16);
}

// out[r][columns] = out[r] * alpha[r] + sum over t in order of weight[r][t] * value(t).
template <class Cache, int kRows, int kChunks, bool kPrefetch>
static inline void add_values(const uint8_t* const* values, const uint8_t* const* next, int num_tokens, int padded,
                              int column, const float* weights, const float* alpha, float* out) {
#if defined(OCTAVO_ISA_AVX2)
  if constexpr (kRows <= 3)
    return add_values_to_few<Cache, kRows, kChunks, kPrefetch>(values, next, num_tokens, padded, column, weights, alpha,
                                                               out);
#endif
  using T = typename Cache::T;
  V16 acc[kRows][kChunks];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) {
      const V16 before = V16::load(out + (size_t)r * padded + column + c * 16);
      acc[r][c] = Cache::as_loaded(before * V16::set1(alpha[r]));
    }
  const size_t step = (size_t)padded * sizeof(T), offset = (size_t)column * sizeof(T);
  for (int first = 0; first < num_tokens; first += kBlockTokens) {
    const uint8_t *value = values[first / kBlockTokens] + offset, *ahead = next[first / kBlockTokens] + offset;
    const float* weight = weights + first;
    const float* const end = weight + (num_tokens - first < kBlockTokens ? num_tokens - first : kBlockTokens);
    for (; weight < end; ++weight, value += step, ahead += step) {
#pragma GCC unroll 4
      for (int c = 0; c < kChunks; ++c) {
        if (c * 16 * sizeof(T) % 64 == 0) ask_for<kPrefetch>(ahead + c * 16 * sizeof(T));
        const V16 v = Cache::load((const T*)value + c * 16);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) acc[r][c] = fma(V16::set1(weight[(size_t)r * kPieceTokens]), v, acc[r][c]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) Cache::in_order(acc[r][c]).store(out + (size_t)r * padded + column + c * 16);
}

struct SpanState {  // of all rows of a tile; row = token * group + head
  float* high;      // [rows] running maximum of the scores
  float* sum;       // [rows] running sum of the weights, 0: nothing seen yet
  float* out;       // [rows][padded], not yet divided by `sum`
};

// Where the blocks of a piece lie, and those of the piece that this thread probably takes next: the next one of the
// sequence, or the first of the next task.
struct Piece {
  const uint8_t *keys[kPieceBlocks], *values[kPieceBlocks];
  const uint8_t *next_keys[kPieceBlocks], *next_values[kPieceBlocks];
};

// `value_offset`: of a block's values, in bytes.
static inline Piece find_piece(const AttentionTask& t, int piece, int blocks, size_t value_offset) {
  Piece p;
  const int last_pos = t.first_pos + t.num_tokens - 1;
  const bool is_last = piece + kPieceTokens > last_pos;
  const uint8_t* const next_kv = is_last ? t.next_kv : t.kv;
  const int32_t* const next_ids = is_last ? t.next_block_ids : t.block_ids;
  const int next_block =
      (is_last ? first_seen(t.next_first_pos, t.window) / kPieceTokens * kPieceTokens : piece + kPieceTokens) / 16;
  const int last_block = (is_last ? t.next_last_pos : last_pos) / 16;
  for (int b = 0; b < blocks; ++b) {
    p.keys[b] = t.kv + (size_t)t.block_ids[piece / 16 + b] * t.block_stride;
    p.values[b] = p.keys[b] + value_offset;
    p.next_keys[b] = next_kv != nullptr && next_block + b <= last_block
                         ? next_kv + (size_t)next_ids[next_block + b] * t.block_stride
                         : p.keys[b];
    p.next_values[b] = p.next_keys[b] + value_offset;
  }
  return p;
}

static inline SpanState state_at(float* memory, int rows) { return {memory, memory + rows, memory + 2 * rows}; }

static inline void clear_state(const SpanState& s, int rows, int head_dim) {
  std::fill_n(s.high, state_floats(rows, head_dim), 0.0f);
  std::fill_n(s.high, rows, -INFINITY);
}

// Adds what rows gathered from the next span to `total`.
static void merge_state(const SpanState& total, const SpanState& part, int rows, int head_dim) {
  const int padded = padded16(head_dim);
  for (int r = 0; r < rows; ++r) {
    if (part.sum[r] == 0.0f) continue;
    float *out = total.out + (size_t)r * padded, *more = part.out + (size_t)r * padded;
    if (total.sum[r] == 0.0f) {
      total.high[r] = part.high[r];
      total.sum[r] = part.sum[r];
      memcpy(out, more, (size_t)padded * 4);
      continue;
    }
    const float high = part.high[r] > total.high[r] ? part.high[r] : total.high[r];
    float factors[16] = {total.high[r] - high, part.high[r] - high};
    power_of_two(V16::load(factors)).store(factors);
    const V16 old_factor = V16::set1(factors[0]), new_factor = V16::set1(factors[1]);
    total.high[r] = high;
    total.sum[r] = total.sum[r] * factors[0] + part.sum[r] * factors[1];
    for (int d = 0; d < padded; d += 16)
      fma(V16::load(out + d), old_factor, V16::load(more + d) * new_factor).store(out + d);
  }
}

static void write_outputs(const AttentionTask& t, const SpanState& s) {
  const int padded = padded16(t.head_dim);
  for (int r = 0; r < t.num_tokens * t.group; ++r) {
    float* out = t.out + (size_t)(r / t.group) * t.ldo + (size_t)(r % t.group) * t.head_dim;
    const V16 inverse = V16::set1(1.0f / s.sum[r]);
    for (int d = 0; d < t.head_dim; d += 16) {
      const V16 y = V16::load(s.out + (size_t)r * padded + d) * inverse;
      d + 16 <= t.head_dim ? y.store(out + d) : y.store_partial(out + d, t.head_dim - d);
    }
  }
}

static void merge_spans(const AttentionTask& t) {
  const int rows = t.num_tokens * t.group, spans = last_span(t) - first_span(t) + 1;
  const SpanState total = state_at(t.states, rows);
  for (int i = 1; i < spans; ++i)
    merge_state(total, state_at(t.states + (size_t)i * state_floats(rows, t.head_dim), rows), rows, t.head_dim);
  write_outputs(t, total);
}

// Calls attend(first key, last key, state) for the spans that the task asks for, with cleared states. `memory`: of two
// states.
template <class F>
static inline void attend_spans(const AttentionTask& t, float* memory, const F& attend) {
  const int rows = t.num_tokens * t.group, last_pos = t.first_pos + t.num_tokens - 1;
  const size_t floats = state_floats(rows, t.head_dim);
  const auto attend_to = [&](int span, const SpanState& s) {
    clear_state(s, rows, t.head_dim);
    attend(std::max(first_seen(t.first_pos, t.window), span * kSpanTokens),
           std::min(last_pos, span * kSpanTokens + kSpanTokens - 1), s);
  };
  if (t.span >= 0) return attend_to(t.span, state_at(t.states + (size_t)(t.span - first_span(t)) * floats, rows));
  const SpanState total = state_at(memory, rows), part = state_at(memory + floats, rows);
  attend_to(first_span(t), total);
  for (int span = first_span(t) + 1; span <= last_span(t); ++span) {
    attend_to(span, part);
    merge_state(total, part, rows, t.head_dim);
  }
  write_outputs(t, total);
}

struct Visible {  // tokens [lo, hi) of a piece
  int lo, hi;
  inline bool none() const { return lo >= hi; }
  inline bool all() const { return lo == 0 && hi == kPieceTokens; }
};

static inline Visible visible(const AttentionTask& t, int row, int piece) {
  const int position = t.first_pos + row / t.group;
  const int lo = first_seen(position, t.window) - piece, hi = position + 1 - piece;
  return {lo < 0 ? 0 : lo, hi > kPieceTokens ? kPieceTokens : hi};
}

// Sets what the row may not see to -inf, in place; returns the maximum of the rest.
static inline float mask_row(float* scores, Visible seen) {
  V16 top = V16::set1(-INFINITY);
#pragma GCC unroll 4
  for (int i = 0; i < kPieceTokens; i += 16) {
    V16 s = V16::load(scores + i);
    if (!seen.all()) {
      const int from = seen.lo - i < 0 ? 0 : seen.lo - i > 16 ? 16 : seen.lo - i;
      const int to = seen.hi - i < 0 ? 0 : seen.hi - i > 16 ? 16 : seen.hi - i;
      s = from < to ? keep_range(s, from, to, -INFINITY) : V16::set1(-INFINITY);
      s.store(scores + i);
    }
    top = max(top, s);
  }
  return hmax(top);
}

// Makes the scores of one piece of kRows <= 16 rows, from `row` of the tile on, weights, and updates each row's maximum
// and sum. factors[r]: for what row r has gathered so far.
template <int kRows>
static inline void soften(const AttentionTask& t, int row, int piece, float* scores, float* high, float* sum,
                          float* factors) {
  Visible seen[kRows];
  float drop[16] = {};  // high - new high, at most 0
  for (int r = 0; r < kRows; ++r) {
    seen[r] = visible(t, row + r, piece);
    if (seen[r].none()) continue;
    const float piece_high = mask_row(scores + (size_t)r * kPieceTokens, seen[r]);
    const float new_high = piece_high > high[r] ? piece_high : high[r];
    drop[r] = high[r] - new_high;
    high[r] = new_high;
  }
  power_of_two(V16::load(drop)).store(factors);
  for (int r = 0; r < kRows; ++r) {
    float* const s = scores + (size_t)r * kPieceTokens;
    if (seen[r].none()) {
      memset(s, 0, kPieceTokens * 4);
      continue;
    }
    const V16 shift = V16::set1(high[r]);
    V16 total = V16::zero();
#pragma GCC unroll 4
    for (int i = 0; i < kPieceTokens; i += 16) {
      const V16 w = power_of_two(V16::load(s + i) - shift);
      w.store(s + i);
      total = total + w;
    }
    sum[r] = sum[r] * factors[r] + hsum(total);
  }
}

// Takes the scale of every token's key (which = 0) into its scores, or of its value (1) into its weights.
template <int kRows>
static inline void scale_blocks(const uint8_t* const* keys, int blocks, int head_dim, int which, float* scores) {
  for (int b = 0; b < blocks; ++b) {
    const V16 scale = load_bf16(scales_of<Int8Cache>((const int8_t*)keys[b], head_dim) + which * kBlockTokens);
    for (int r = 0; r < kRows; ++r) {
      float* s = scores + (size_t)r * kPieceTokens + b * 16;
      (V16::load(s) * scale).store(s);
    }
  }
}

template <class Cache, int kRows, bool kPrefetch>
static void attend_rows(const AttentionTask& t, const float* queries, const SpanState& state, int row, int piece,
                        int num_tokens, const Piece& p, float* scores) {
  const int blocks = (num_tokens + 15) / 16, padded = padded16(t.head_dim);
  const float* q = queries + (size_t)row * t.head_dim;
  constexpr int kAtOnce = columns_at_once(kRows);
  int b = 0;
  for (; b + kAtOnce <= blocks; b += kAtOnce)
    score_blocks<Cache, kRows, kAtOnce, kPrefetch>(q, t.head_dim, p.keys + b, p.next_keys + b, scores + b * 16);
  for (; b < blocks; ++b)
    score_blocks<Cache, kRows, 1, kPrefetch>(q, t.head_dim, p.keys + b, p.next_keys + b, scores + b * 16);
  if constexpr (std::is_same_v<Cache, Int8Cache>) scale_blocks<kRows>(p.keys, blocks, t.head_dim, 0, scores);

  float alpha[16];
  soften<kRows>(t, row, piece, scores, state.high + row, state.sum + row, alpha);
  if constexpr (std::is_same_v<Cache, Int8Cache>) scale_blocks<kRows>(p.keys, blocks, t.head_dim, 1, scores);
  float* out = state.out + (size_t)row * padded;
  int column = 0;
  for (; column + kAtOnce * 16 <= padded; column += kAtOnce * 16)
    add_values<Cache, kRows, kAtOnce, kPrefetch>(p.values, p.next_values, num_tokens, padded, column, scores, alpha,
                                                 out);
  for (; column < padded; column += 16)
    add_values<Cache, kRows, 1, kPrefetch>(p.values, p.next_values, num_tokens, padded, column, scores, alpha, out);
}

static inline size_t wide_piece_floats(int head_dim) { return (size_t)kPieceTokens * (head_dim + padded16(head_dim)); }

// Rows from which on a piece of bf16 keys and values is turned to floats once, instead of once for every few rows.
static constexpr int kWideAttention = 3 * kRowsAtOnce;

static inline Piece widen_piece(const Piece& p, int blocks, int head_dim, float* out) {
  const auto widen = [&](const uint8_t* from, int floats) {
    const float* const begin = out;
    for (int i = 0; i < floats; i += 16, out += 16) load_bf16((const uint16_t*)from + i).store(out);
    return (const uint8_t*)begin;
  };
  Piece wide;
  for (int b = 0; b < blocks; ++b) {
    wide.keys[b] = widen(p.keys[b], head_dim * 16);
    wide.values[b] = widen(p.values[b], padded16(head_dim) * kBlockTokens);
  }
  return wide;
}

template <class Cache>
static void attend(const AttentionTask& t, float* scratch) {
  const int num_rows = t.num_tokens * t.group;
  float* const wide = scratch;
  float* const scores = wide + wide_piece_floats(t.head_dim);
  float* const queries = scores + (size_t)kRowsAtOnce * kPieceTokens;  // [rows][head_dim], scaled
  const float scale = t.scale / kLn2;
  for (int r = 0; r < num_rows; ++r) {
    const float* q = t.q + (size_t)(r / t.group) * t.ldq + (size_t)(r % t.group) * t.head_dim;
    for (int d = 0; d < t.head_dim; ++d) queries[(size_t)r * t.head_dim + d] = q[d] * scale;
  }
  attend_spans(t, queries + (size_t)num_rows * t.head_dim, [&](int first, int last, const SpanState& state) {
    for (int piece = first / kPieceTokens * kPieceTokens; piece <= last; piece += kPieceTokens) {
      const int num_tokens = std::min(last + 1 - piece, kPieceTokens);
      const int blocks = (num_tokens + 15) / 16;
      const Piece p = find_piece(t, piece, blocks, (size_t)t.head_dim * 16 * sizeof(typename Cache::T));
      if (std::is_same_v<Cache, Bf16Cache> && num_rows >= kWideAttention) {
        const Piece floats = widen_piece(p, blocks, t.head_dim, wide);
        in_row_tiles<kRowsAtOnce>(num_rows, [&](int row, auto rows) {
          attend_rows<F32Cache, rows.value, false>(t, queries, state, row, piece, num_tokens, floats, scores);
        });
        continue;
      }
      in_row_tiles<kRowsAtOnce>(num_rows, [&](int row, auto rows) {
        num_rows <= kRowsAtOnce
            ? attend_rows<Cache, rows.value, true>(t, queries, state, row, piece, num_tokens, p, scores)
            : attend_rows<Cache, rows.value, false>(t, queries, state, row, piece, num_tokens, p, scores);
      });
    }
  });
}

static size_t row_scratch_bytes(int group, int head_dim) {
  const size_t rows = (size_t)kTileTokens * group;
  return 4 * (wide_piece_floats(head_dim) + (size_t)kRowsAtOnce * kPieceTokens + rows * head_dim +
              2 * state_floats((int)rows, head_dim));
}

static void store_kv_rows(const float* k, const float* v, int head_dim, KvType type, uint8_t* kv, int offset) {
  switch (type) {
    case KvType::kBf16:
      return store_kv_as<Bf16Cache>(k, v, head_dim, kv, offset);
    case KvType::kF32:
      return store_kv_as<F32Cache>(k, v, head_dim, kv, offset);
    case KvType::kInt8:
      return store_kv_as<Int8Cache>(k, v, head_dim, kv, offset);
  }
}

static void attention_rows(const AttentionTask& task, KvType type, float* scratch) {
  switch (type) {
    case KvType::kBf16:
      return attend<Bf16Cache>(task, scratch);
    case KvType::kF32:
      return attend<F32Cache>(task, scratch);
    case KvType::kInt8:
      return attend<Int8Cache>(task, scratch);
  }
}

#if !defined(OCTAVO_BF16_ATTENTION)
static void store_kv(const float* k, const float* v, int head_dim, KvType type, uint8_t* kv, int offset) {
  store_kv_rows(k, v, head_dim, type, kv, offset);
}

static size_t attention_scratch_bytes(int group, int head_dim) { return row_scratch_bytes(group, head_dim); }

static void attention(const AttentionTask& task, KvType type, void* scratch) {
  attention_rows(task, type, (float*)scratch);
}
#endif
