// Paged attention in bf16 products over a bf16 cache. Pieces and online softmax are those of attention.inl; queries and
// weights are rounded to bf16 (the sum of weights takes the rounded ones, so they still add up to one). How products
// are made, attention_amx.inl and attention_dots.inl say: begin_products, score_rows, add_weighed_values, end_products.
//
// KV of a block and head: keys [D / 2][16 tokens][2], D = head_dim rounded up to 32; then values, for each 16 columns,
// [8 token pairs][16 columns][2]. Both are right operands as they lie. A block is cleared when its first token is
// written, since products also read the slots behind the last token (with weight 0, which NaN would survive).

static void store_kv_pairs(const float* k, const float* v, int head_dim, uint8_t* kv, int offset) {
  const int depth = padded32(head_dim);
  if (offset == 0) memset(kv, 0, kv_block_head_bytes(head_dim, KvType::kBf16));
  uint32_t* keys = (uint32_t*)kv + offset;
  uint16_t* values = (uint16_t*)kv + (size_t)depth * 16 + (size_t)(offset / 2) * 32 + offset % 2;
  for (int d = 0; d < head_dim; d += 16) {
    alignas(32) uint16_t key[16], value[16];
    const int left = lanes_left(head_dim, d);
    _mm256_store_si256((__m256i*)key, (__m256i)_mm512_cvtneps_pbh(V16::load_partial(k + d, left).v));
    _mm256_store_si256((__m256i*)value, (__m256i)_mm512_cvtneps_pbh(V16::load_partial(v + d, left).v));
    uint32_t pairs[8];
    memcpy(pairs, key, sizeof pairs);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) keys[(size_t)(d / 2 + i) * 16] = pairs[i];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) values[(size_t)d * 16 + (size_t)i * 2] = value[i];
  }
}

struct PairScratch {
  float* scores;      // [16][64]
  float* update;      // [16][padded] what one piece adds
  float* states;      // of attend_spans
  uint16_t* weights;  // [16][64]
  uint16_t* q;        // [rows][depth]
};

static inline size_t pair_scratch_bytes(int rows, int head_dim, PairScratch* s, uint8_t* base) {
  const int padded = padded16(head_dim), depth = padded32(head_dim);
  size_t at = 0;
  const auto take = [&](size_t bytes) {
    uint8_t* p = base + at;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  s->scores = (float*)take(16 * kPieceTokens * 4);
  s->update = (float*)take((size_t)16 * padded * 4);
  s->states = (float*)take(2 * state_floats(rows, head_dim) * 4);
  s->weights = (uint16_t*)take(16 * kPieceTokens * 2);
  s->q = (uint16_t*)take((size_t)rows * depth * 2);
  return at;
}

// 2^x for x <= 0, within 1e-4 of it: enough for a result that is rounded to bf16 (2^-9). Exactly 0 once it is rounded
// so below -150, as for what a row may not see. Cubic through the Chebyshev nodes of [-1/2, 1/2].
static inline V16 coarse_power_of_two(V16 x) {
  const V16 y = max(x, V16::set1(-150.0f)), n = round_nearest(y), r = y - n;
  V16 p = fma(V16::set1(0.0558382832f), r, V16::set1(0.242639482f));
  p = fma(p, r, V16::set1(0.693136752f));
  p = fma(p, r, V16::set1(0.999924541f));
  return {_mm512_scalef_ps(p.v, n.v)};
}

// bf16 weights 2^(score - high) of one row; returns their sum.
static inline float weigh_row(const float* scores, float high, uint16_t* weights) {
  const V16 shift = V16::set1(high);
  V16 total = V16::zero();
#pragma GCC unroll 4
  for (int i = 0; i < kPieceTokens; i += 16) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(coarse_power_of_two(V16::load(scores + i) - shift).v);
    _mm256_storeu_si256((__m256i*)(weights + i), rounded);
    total = total + V16{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16))};
  }
  return hsum(total);
}

// Scores of up to 16 rows over a piece to weights; updates each row's maximum and sum. alpha[r] becomes the factor for
// what row r has gathered so far.
static inline void soften_rows(float* scores, uint16_t* weights, const Visible* seen, int rows, float* high, float* sum,
                               float* alpha) {
  alignas(64) float drop[16] = {};  // high - new high, at most 0
  for (int r = 0; r < rows; ++r) {
    if (seen[r].none()) continue;
    const float piece_high = mask_row(scores + (size_t)r * kPieceTokens, seen[r]);
    const float new_high = piece_high > high[r] ? piece_high : high[r];
    drop[r] = high[r] - new_high;
    high[r] = new_high;
  }
  power_of_two(V16::load(drop)).store(alpha);
  for (int r = 0; r < rows; ++r) {
    uint16_t* w = weights + (size_t)r * kPieceTokens;
    if (seen[r].none()) {
      memset(w, 0, kPieceTokens * 2);
    } else {
      sum[r] = sum[r] * alpha[r] + weigh_row(scores + (size_t)r * kPieceTokens, high[r], w);
    }
  }
}

static inline void load_queries(const AttentionTask& t, const PairScratch& s, int num_rows, int rows_up) {
  const int depth = padded32(t.head_dim);
  memset(s.q, 0, (size_t)rows_up * depth * 2);
  const V16 scale = V16::set1(t.scale / kLn2);
  for (int r = 0; r < num_rows; ++r) {
    const float* q = t.q + (size_t)(r / t.group) * t.ldq + (size_t)(r % t.group) * t.head_dim;
    for (int d = 0; d < t.head_dim; d += 16) {
      const int left = lanes_left(t.head_dim, d);
      const __m256i b = (__m256i)_mm512_cvtneps_pbh((V16::load_partial(q + d, left) * scale).v);
      _mm256_mask_storeu_epi16(s.q + (size_t)r * depth + d, (__mmask16)((1u << left) - 1u), b);
    }
  }
}

#if defined(OCTAVO_ISA_AMX)
#include "attention_amx.inl"
#else
#include "attention_dots.inl"
#endif

static void attend_pairs(const AttentionTask& t, uint8_t* scratch) {
  const int num_rows = t.num_tokens * t.group, depth = padded32(t.head_dim), padded = padded16(t.head_dim);
  const int rows_up = padded16(num_rows);
  PairScratch s;
  pair_scratch_bytes(rows_up, t.head_dim, &s, (uint8_t*)(((uintptr_t)scratch + 63) / 64 * 64));
  load_queries(t, s, num_rows, rows_up);
  begin_products(num_rows < 16 ? num_rows : 16);

  attend_spans(t, s.states, [&](int first, int last, const SpanState& state) {
    for (int piece = first / kPieceTokens * kPieceTokens; piece <= last; piece += kPieceTokens) {
      const int blocks = (std::min(last + 1 - piece, kPieceTokens) + 15) / 16;
      const Piece p = find_piece(t, piece, blocks, (size_t)depth * 32);
      for (int row = 0; row < num_rows; row += 16) {
        const int rows = num_rows - row < 16 ? num_rows - row : 16;
        // Causality: the first rows of a tile may see nothing of its last piece.
        if (t.first_pos + (row + rows - 1) / t.group < piece) continue;
        score_rows(s.q + (size_t)row * depth, rows, depth, p.keys, p.next_keys, blocks, s.scores);
        alignas(64) float alpha[16];
        Visible seen[16];
        for (int r = 0; r < rows; ++r) seen[r] = visible(t, row + r, piece);
        soften_rows(s.scores, s.weights, seen, rows, state.high + row, state.sum + row, alpha);
        add_weighed_values(s, rows, p.values, p.next_values, blocks, padded, alpha, state.out + (size_t)row * padded);
      }
    }
  });
  end_products();
}

static void store_kv(const float* k, const float* v, int head_dim, KvType type, uint8_t* kv, int offset) {
  type == KvType::kBf16 ? store_kv_pairs(k, v, head_dim, kv, offset) : store_kv_rows(k, v, head_dim, type, kv, offset);
}

static size_t attention_scratch_bytes(int group, int head_dim) {
  PairScratch s;
  const size_t pairs = pair_scratch_bytes(padded16(kTileTokens * group), head_dim, &s, nullptr) + 64;
  const size_t rows = row_scratch_bytes(group, head_dim);
  return pairs > rows ? pairs : rows;
}

static void attention(const AttentionTask& task, KvType type, void* scratch) {
  type == KvType::kBf16 ? attend_pairs(task, (uint8_t*)scratch) : attention_rows(task, type, (float*)scratch);
}
