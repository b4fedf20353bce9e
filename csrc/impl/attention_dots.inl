// The products of attention_pairs.inl by bf16 dot products of vectors (vdpbf16ps).

static constexpr int kDotRows = 6;  // most rows at once: 6 x 4 sums

static inline void begin_products(int) {}
static inline void end_products() {}

// Asking for the next piece: 64 sequences of 1,024 tokens, one core of a Zen 4: 17 GB/s without, 15 into the first
// cache, 23 so.
template <bool kPrefetch>
static inline __m512bh load_pairs(const uint8_t* p, const uint8_t* next) {
  ask_for<kPrefetch>(next);
  return (__m512bh)_mm512_loadu_si512(p);
}

template <int kRows, int kBlocks, bool kPrefetch>
static inline void score_dots(const uint16_t* q, int depth, const uint8_t* const* keys, const uint8_t* const* next,
                              float* scores) {
  __m512 sum[kRows][kBlocks];
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) sum[r][b] = _mm512_setzero_ps();
  for (int d = 0; d < depth; d += 2) {
    __m512bh key[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b)
      key[b] = load_pairs<kPrefetch>(keys[b] + (size_t)d * 32, next[b] + (size_t)d * 32);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512bh v = broadcast_pair(q + (size_t)r * depth + d);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sum[r][b] = _mm512_dpbf16_ps(sum[r][b], v, key[b]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) _mm512_storeu_ps(scores + (size_t)r * kPieceTokens + b * 16, sum[r][b]);
}

// out[r][64 columns, or fewer] = out[r] * alpha[r] + weights[r] . values, tokens two by two in order.
template <int kRows, int kChunks, bool kPrefetch>
static inline void value_dots(const uint16_t* weights, const uint8_t* const* values, const uint8_t* const* next,
                              int blocks, int padded, int column, const float* alpha, float* out) {
  __m512 sum[kRows][kChunks];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) sum[r][c] = _mm512_setzero_ps();
  for (int b = 0; b < blocks; ++b) {
    const uint8_t *value = values[b] + (size_t)column * 32, *ahead = next[b] + (size_t)column * 32;
#pragma GCC unroll 2
    for (int t = 0; t < 8; ++t) {
      __m512bh v[kChunks];
#pragma GCC unroll 4
      for (int c = 0; c < kChunks; ++c)
        v[c] = load_pairs<kPrefetch>(value + c * 512 + t * 64, ahead + c * 512 + t * 64);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512bh w = broadcast_pair(weights + (size_t)r * kPieceTokens + b * 16 + 2 * t);
#pragma GCC unroll 4
        for (int c = 0; c < kChunks; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], w, v[c]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) {
      float* place = out + (size_t)r * padded + column + c * 16;
      fma(V16::load(place), V16::set1(alpha[r]), {sum[r][c]}).store(place);
    }
}

template <int kRows, bool kPrefetch>
static void score_some(const uint16_t* q, int depth, const uint8_t* const* keys, const uint8_t* const* next, int blocks,
                       float* scores) {
  if (blocks == kPieceBlocks) return score_dots<kRows, kPieceBlocks, kPrefetch>(q, depth, keys, next, scores);
  for (int b = 0; b < blocks; ++b) score_dots<kRows, 1, kPrefetch>(q, depth, keys + b, next + b, scores + b * 16);
}

template <int kRows, bool kPrefetch>
static void weigh_some(const uint16_t* weights, const uint8_t* const* values, const uint8_t* const* next, int blocks,
                       int padded, const float* alpha, float* out) {
  int column = 0;
  for (; column + 64 <= padded; column += 64)
    value_dots<kRows, 4, kPrefetch>(weights, values, next, blocks, padded, column, alpha, out);
  for (; column < padded; column += 16)
    value_dots<kRows, 1, kPrefetch>(weights, values, next, blocks, padded, column, alpha, out);
}

// scores[rows][64] = q . keys for up to four blocks. `next`: the keys of the next piece.
static inline void score_rows(const uint16_t* q, int rows, int depth, const uint8_t* const* keys,
                              const uint8_t* const* next, int blocks, float* scores) {
  in_row_tiles<kDotRows>(rows, [&](int row, auto count) {
    float* to = scores + (size_t)row * kPieceTokens;
    const uint16_t* from = q + (size_t)row * depth;
    rows <= kDotRows ? score_some<count.value, true>(from, depth, keys, next, blocks, to)
                     : score_some<count.value, false>(from, depth, keys, next, blocks, to);
  });
}

static inline void add_weighed_values(const PairScratch& s, int rows, const uint8_t* const* values,
                                      const uint8_t* const* next, int blocks, int padded, const float* alpha,
                                      float* out) {
  in_row_tiles<kDotRows>(rows, [&](int row, auto count) {
    const uint16_t* weights = s.weights + (size_t)row * kPieceTokens;
    float* to = out + (size_t)row * padded;
    rows <= kDotRows ? weigh_some<count.value, true>(weights, values, next, blocks, padded, alpha + row, to)
                     : weigh_some<count.value, false>(weights, values, next, blocks, padded, alpha + row, to);
  });
}
