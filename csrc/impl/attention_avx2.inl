// Attention of up to three rows with 16 registers: half a vector of 16 keys or value columns after the other.
//
// 12 registers hold the sums of 3 x 2 vectors, three the rows' factors, and one is left. GCC 12 by itself loads what it
// can at first and keeps a sum in memory instead, whose way there and back takes longer than all the rest (Zen 3, one
// core, KV in cache: 12 GB/s, so 20). What keeps all of them in registers is fragile: score_few() inlined first, no
// std::min in add_values_to_few(). See with objdump that no vfmadd names the stack.

// No load moves up from below.
static inline void load_later(__m256& sum) { asm volatile("" : "+x"(sum) : : "memory"); }

template <class Cache, int kRows, int kBlocks, bool kPrefetch>
__attribute__((always_inline)) static inline void score_few(const float* q, int head_dim, const uint8_t* const* keys,
                                                            const uint8_t* const* next, float* scores) {
  using T = typename Cache::T;
  __m256 acc[kRows][kBlocks][2];
  const uint8_t *key_at[kBlocks], *next_at[kBlocks];
  for (int b = 0; b < kBlocks; ++b) key_at[b] = keys[b], next_at[b] = next[b];
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) acc[r][b][0] = acc[r][b][1] = _mm256_setzero_ps();
  for (int d = 0; d < head_dim; ++d) {
    const size_t at = (size_t)d * 16 * sizeof(T);
    __m256 x[kRows];
    for (int r = 0; r < kRows; ++r) x[r] = _mm256_set1_ps(q[(size_t)r * head_dim + d]);
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) {
      if (at % 64 == 0) ask_for<kPrefetch>(next_at[b] + at);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256 key = Cache::load_half((const T*)(key_at[b] + at), h);
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) acc[r][b][h] = _mm256_fmadd_ps(x[r], key, acc[r][b][h]);
        load_later(acc[0][b][h]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b)
      Cache::in_order(V16{acc[r][b][0], acc[r][b][1]}).store(scores + (size_t)r * kPieceTokens + b * 16);
}

template <class Cache, int kRows, int kChunks, bool kPrefetch>
static inline void add_values_to_few(const uint8_t* const* values, const uint8_t* const* next, int num_tokens,
                                     int padded, int column, const float* weights, const float* alpha, float* out) {
  using T = typename Cache::T;
  __m256 acc[kRows][kChunks][2];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) {
      const V16 before = V16::load(out + (size_t)r * padded + column + c * 16);
      const V16 x = Cache::as_loaded(before * V16::set1(alpha[r]));
      acc[r][c][0] = x.a, acc[r][c][1] = x.b;
    }
  const size_t step = (size_t)padded * sizeof(T), offset = (size_t)column * sizeof(T);
  for (int first = 0; first < num_tokens; first += kBlockTokens) {
    const uint8_t *value = values[first / kBlockTokens] + offset, *ahead = next[first / kBlockTokens] + offset;
    const int end = num_tokens - first < kBlockTokens ? num_tokens - first : kBlockTokens;
    for (int t = 0; t < end; ++t, value += step, ahead += step) {
      __m256 x[kRows];
      for (int r = 0; r < kRows; ++r) x[r] = _mm256_set1_ps(weights[(size_t)r * kPieceTokens + first + t]);
#pragma GCC unroll 2
      for (int c = 0; c < kChunks; ++c) {
        if (c * 16 * sizeof(T) % 64 == 0) ask_for<kPrefetch>(ahead + c * 16 * sizeof(T));
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const __m256 v = Cache::load_half((const T*)value + c * 16, h);
#pragma GCC unroll 3
          for (int r = 0; r < kRows; ++r) acc[r][c][h] = _mm256_fmadd_ps(x[r], v, acc[r][c][h]);
          load_later(acc[0][c][h]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c)
      Cache::in_order(V16{acc[r][c][0], acc[r][c][1]}).store(out + (size_t)r * padded + column + c * 16);
}
