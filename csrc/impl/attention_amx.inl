// Paged attention on AMX tiles over a bf16 cache. Pieces and online softmax are those of attention.inl; queries and
// weights are rounded to bf16 (the sum of weights takes the rounded ones, so they still add up to one).
//
// KV of a block and head: keys [D / 2][16 tokens][2], D = head_dim rounded up to 32; then values, for each 16 columns,
// [8 token pairs][16 columns][2]. Both are right operands of tile ops as they lie. A block is cleared when its first
// token is written, since tile ops also read the slots behind the last token (with weight 0, which NaN would survive).

static inline int padded32(int n) { return (n + 31) / 32 * 32; }

static void store_kv_tiles(const float* k, const float* v, int head_dim, uint8_t* kv, int offset) {
  const int depth = padded32(head_dim);
  if (offset == 0) memset(kv, 0, kv_block_head_bytes(head_dim, false));
  uint32_t* keys = (uint32_t*)kv;
  for (int d = 0; d < head_dim; d += 2) {
    const uint32_t second = d + 1 < head_dim ? float_to_bf16(k[d + 1]) : 0u;
    keys[(size_t)(d / 2) * 16 + offset] = float_to_bf16(k[d]) | second << 16;
  }
  uint16_t* values = (uint16_t*)kv + (size_t)depth * 16 + (size_t)(offset / 2) * 32 + offset % 2;
  for (int d = 0; d < head_dim; ++d) values[(size_t)(d / 16) * 256 + (size_t)(d % 16) * 2] = float_to_bf16(v[d]);
}

// Tiles 0 to 3: sums; 4: queries; 5: keys; 6: weights of one block; 7: values of one block.
static inline void configure_attention(int rows) {
  TileConfig c;
  for (int t = 0; t < 4; ++t) {
    c.rows[t] = (uint8_t)rows;
    c.bytes[t] = 64;
  }
  c.rows[4] = c.rows[6] = (uint8_t)rows;
  c.bytes[4] = 64;
  c.bytes[6] = 32;
  c.rows[5] = 16;
  c.rows[7] = 8;
  c.bytes[5] = c.bytes[7] = 64;
  _tile_loadconfig(&c);
}

struct TileScratch {
  float* scores;      // [16][64]
  float* update;      // [16][padded] what one piece adds
  float* high;        // [rows]
  float* sum;         // [rows]
  float* out;         // [rows][padded]
  uint16_t* weights;  // [16][64]
  uint16_t* q;        // [rows][depth]
};

static inline size_t tile_scratch_bytes(int rows, int head_dim, TileScratch* s, uint8_t* base) {
  const int padded = (head_dim + 15) / 16 * 16, depth = padded32(head_dim);
  size_t at = 0;
  const auto take = [&](size_t bytes) {
    uint8_t* p = base + at;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  s->scores = (float*)take(16 * kPieceTokens * 4);
  s->update = (float*)take((size_t)16 * padded * 4);
  s->high = (float*)take((size_t)rows * 4);
  s->sum = (float*)take((size_t)rows * 4);
  s->out = (float*)take((size_t)rows * padded * 4);
  s->weights = (uint16_t*)take(16 * kPieceTokens * 2);
  s->q = (uint16_t*)take((size_t)rows * depth * 2);
  return at;
}

struct Visible {  // tokens [lo, hi) of a piece
  int lo, hi;
  inline bool none() const { return lo >= hi; }
  inline bool all() const { return lo == 0 && hi == kPieceTokens; }
};

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

// bf16 weights exp(score - high) of one row; returns their sum.
static inline float weigh_row(const float* scores, float high, uint16_t* weights) {
  const V16 shift = V16::set1(high);
  V16 total = V16::zero();
#pragma GCC unroll 4
  for (int i = 0; i < kPieceTokens; i += 16) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(exp16(V16::load(scores + i) - shift).v);
    _mm256_storeu_si256((__m256i*)(weights + i), rounded);
    total = total + V16{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16))};
  }
  return hsum(total);
}

// Scores of up to 16 rows over a piece to weights; updates each row's maximum and sum. alpha[r] becomes the factor for
// what row r has gathered so far.
static inline void soften_tiles(float* scores, uint16_t* weights, const Visible* seen, int rows, float* high,
                                float* sum, float* alpha) {
  alignas(64) float drop[16] = {};  // high - new high, at most 0
  for (int r = 0; r < rows; ++r) {
    if (seen[r].none()) continue;
    const float piece_high = mask_row(scores + (size_t)r * kPieceTokens, seen[r]);
    const float new_high = piece_high > high[r] ? piece_high : high[r];
    drop[r] = high[r] - new_high;
    high[r] = new_high;
  }
  exp16(V16::load(drop)).store(alpha);
  for (int r = 0; r < rows; ++r) {
    uint16_t* w = weights + (size_t)r * kPieceTokens;
    if (seen[r].none()) {
      memset(w, 0, kPieceTokens * 2);
    } else {
      sum[r] = sum[r] * alpha[r] + weigh_row(scores + (size_t)r * kPieceTokens, high[r], w);
    }
  }
}

// scores[16][64] = q . keys for up to four blocks.
static inline void score_tiles(const uint16_t* q, int depth, const uint8_t* const* kv, int blocks, float* scores) {
  const size_t ld = (size_t)depth * 2;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < depth; d += 32) {
    const size_t at = (size_t)d * 32;
    _tile_loadd(4, q + d, ld);
    _tile_loadd(5, kv[0] + at, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (blocks > 1) {
      _tile_loadd(5, kv[1] + at, 64);
      _tile_dpbf16ps(1, 4, 5);
    }
    if (blocks > 2) {
      _tile_loadd(5, kv[2] + at, 64);
      _tile_dpbf16ps(2, 4, 5);
    }
    if (blocks > 3) {
      _tile_loadd(5, kv[3] + at, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, scores, kPieceTokens * 4);
  if (blocks > 1) _tile_stored(1, scores + 16, kPieceTokens * 4);
  if (blocks > 2) _tile_stored(2, scores + 32, kPieceTokens * 4);
  if (blocks > 3) _tile_stored(3, scores + 48, kPieceTokens * 4);
}

// update[16][padded] = weights . values, blocks in order; four chunks of 16 columns at a time.
static inline void value_tiles(const uint16_t* weights, const uint8_t* const* values, int blocks, int padded,
                               float* update) {
  const size_t ld = (size_t)padded * 4;
  for (int c = 0; c < padded; c += 64) {
    const int chunks = padded - c < 64 ? (padded - c) / 16 : 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int b = 0; b < blocks; ++b) {
      const uint8_t* v = values[b] + (size_t)(c / 16) * 512;
      _tile_loadd(6, weights + b * 16, kPieceTokens * 2);
      _tile_loadd(7, v, 64);
      _tile_dpbf16ps(0, 6, 7);
      if (chunks > 1) {
        _tile_loadd(7, v + 512, 64);
        _tile_dpbf16ps(1, 6, 7);
      }
      if (chunks > 2) {
        _tile_loadd(7, v + 1024, 64);
        _tile_dpbf16ps(2, 6, 7);
      }
      if (chunks > 3) {
        _tile_loadd(7, v + 1536, 64);
        _tile_dpbf16ps(3, 6, 7);
      }
    }
    _tile_stored(0, update + c, ld);
    if (chunks > 1) _tile_stored(1, update + c + 16, ld);
    if (chunks > 2) _tile_stored(2, update + c + 32, ld);
    if (chunks > 3) _tile_stored(3, update + c + 48, ld);
  }
}

static inline void load_queries(const AttentionTask& t, const TileScratch& s, int num_rows, int rows_up) {
  const int depth = padded32(t.head_dim), padded = (t.head_dim + 15) / 16 * 16;
  memset(s.q, 0, (size_t)rows_up * depth * 2);
  memset(s.out, 0, (size_t)rows_up * padded * 4);
  const V16 scale = V16::set1(t.scale);
  for (int r = 0; r < num_rows; ++r) {
    const float* q = t.q + (size_t)(r / t.group) * t.ldq + (size_t)(r % t.group) * t.head_dim;
    for (int d = 0; d < t.head_dim; d += 16) {
      const int left = lanes_left(t.head_dim, d);
      const __m256i b = (__m256i)_mm512_cvtneps_pbh((V16::load_partial(q + d, left) * scale).v);
      _mm256_mask_storeu_epi16(s.q + (size_t)r * depth + d, (__mmask16)((1u << left) - 1u), b);
    }
    s.high[r] = -INFINITY;
    s.sum[r] = 0.0f;
  }
}

static void attend_tiles(const AttentionTask& t, uint8_t* scratch) {
  const int num_rows = t.num_tokens * t.group, depth = padded32(t.head_dim), padded = (t.head_dim + 15) / 16 * 16;
  const int tile_rows = num_rows < 16 ? num_rows : 16, rows_up = (num_rows + 15) / 16 * 16;
  TileScratch s;
  tile_scratch_bytes(rows_up, t.head_dim, &s, (uint8_t*)(((uintptr_t)scratch + 63) / 64 * 64));
  load_queries(t, s, num_rows, rows_up);
  configure_attention(tile_rows);

  const int last_pos = t.first_pos + t.num_tokens - 1;
  const int first_seen = t.window > 0 && t.first_pos - t.window + 1 > 0 ? t.first_pos - t.window + 1 : 0;
  for (int piece = first_seen / kPieceTokens * kPieceTokens; piece <= last_pos; piece += kPieceTokens) {
    const int num_tokens = last_pos + 1 - piece < kPieceTokens ? last_pos + 1 - piece : kPieceTokens;
    const int blocks = (num_tokens + 15) / 16;
    const uint8_t* keys[kPieceBlocks] = {};
    const uint8_t* values[kPieceBlocks] = {};
    for (int b = 0; b < blocks; ++b) {
      keys[b] = t.kv + (size_t)t.block_ids[piece / 16 + b] * t.block_stride;
      values[b] = keys[b] + (size_t)depth * 32;
    }
    for (int row = 0; row < num_rows; row += 16) {
      const int rows = num_rows - row < 16 ? num_rows - row : 16;
      // Causality: the first rows of a tile may see nothing of its last piece.
      if (t.first_pos + (row + rows - 1) / t.group < piece) continue;
      score_tiles(s.q + (size_t)row * depth, depth, keys, blocks, s.scores);
      alignas(64) float alpha[16];
      Visible seen[16];
      for (int r = 0; r < rows; ++r) {
        const int position = t.first_pos + (row + r) / t.group;
        const int first = t.window > 0 && position - t.window + 1 > 0 ? position - t.window + 1 : 0;
        const int lo = first - piece, hi = position + 1 - piece;
        seen[r] = {lo < 0 ? 0 : lo, hi > kPieceTokens ? kPieceTokens : hi};
      }
      soften_tiles(s.scores, s.weights, seen, rows, s.high + row, s.sum + row, alpha);
      value_tiles(s.weights, values, blocks, padded, s.update);
      for (int r = 0; r < rows; ++r) {
        float* out = s.out + (size_t)(row + r) * padded;
        const float* update = s.update + (size_t)r * padded;
        const V16 factor = V16::set1(alpha[r]);
        for (int d = 0; d < padded; d += 16) fma(V16::load(out + d), factor, V16::load(update + d)).store(out + d);
      }
    }
  }
  _tile_release();
  for (int r = 0; r < num_rows; ++r) {
    float* out = t.out + (size_t)(r / t.group) * t.ldo + (size_t)(r % t.group) * t.head_dim;
    const V16 inverse = V16::set1(1.0f / s.sum[r]);
    for (int d = 0; d < t.head_dim; d += 16)
      (V16::load(s.out + (size_t)r * padded + d) * inverse).store_partial(out + d, lanes_left(t.head_dim, d));
  }
}

static void store_kv(const float* k, const float* v, int head_dim, bool wide, uint8_t* kv, int offset) {
  wide ? store_kv_as<F32Cache>(k, v, head_dim, kv, offset) : store_kv_tiles(k, v, head_dim, kv, offset);
}

static size_t attention_scratch_bytes(int group, int head_dim) {
  TileScratch s;
  const size_t tiles = tile_scratch_bytes((kTileTokens * group + 15) / 16 * 16, head_dim, &s, nullptr) + 64;
  const size_t rows = row_scratch_bytes(group, head_dim);
  return tiles > rows ? tiles : rows;
}

static void attention(const AttentionTask& task, bool wide, void* scratch) {
  wide ? attend<F32Cache>(task, (float*)scratch) : attend_tiles(task, (uint8_t*)scratch);
}
