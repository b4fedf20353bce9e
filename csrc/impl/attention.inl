// Paged attention, online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) over pieces of 64 tokens.
//
// Pieces lie at fixed positions 0, 64, 128, ... of the sequence and are merged in that order, so the result
// of a query depends on its position and context alone, not on the tile it is computed in (law 1). Keys a
// query may not see get weight exactly 0, and a piece it sees nothing of is skipped for that query.

static constexpr int kPieceTokens = 64;
static constexpr int kPieceBlocks = kPieceTokens / 16;
#if defined(OCTAVO_ISA_AVX512)
static constexpr int kScoreBlocks = 4;  // key blocks at once: 4 rows x 4 = 16 sums in 32 registers
static constexpr int kValueChunks = 4;  // chunks of 16 value columns at once
#else
static constexpr int kScoreBlocks = 1;
static constexpr int kValueChunks = 1;
#endif
static constexpr int kRowsAtOnce = 4;

struct Bf16Cache {
  using T = uint16_t;
  static inline V16 load(const T* p) { return load_bf16(p); }
  static inline T from(float x) { return float_to_bf16(x); }
};
struct F32Cache {
  using T = float;
  static inline V16 load(const T* p) { return V16::load(p); }
  static inline T from(float x) { return x; }
};

// Signed bytes; the scales of a block's 16 keys, then of its 16 values, lie behind them in bf16.
struct Int8Cache {
  using T = int8_t;
  static inline V16 load(const T* p) { return load_i8(p); }
};

template <class Cache>
static inline const uint16_t* scales_of(const typename Cache::T* keys, int head_dim) {
  const size_t key_bytes = (size_t)(head_dim + 31) / 32 * 32, value_bytes = (size_t)(head_dim + 15) / 16 * 16;
  return (const uint16_t*)(keys + kBlockTokens * (key_bytes + value_bytes));
}

template <class Cache>
static void store_kv_as(const float* k, const float* v, int head_dim, uint8_t* kv, int offset) {
  using T = typename Cache::T;
  const int padded = (head_dim + 15) / 16 * 16;
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
  int8_t* values = keys + (size_t)head_dim * 16 + (size_t)offset * ((head_dim + 15) / 16 * 16);
  uint16_t* scales = (uint16_t*)scales_of<Int8Cache>(keys, head_dim);
  scales[offset] = store_bytes(k, head_dim, keys + offset, 16);
  scales[kBlockTokens + offset] = store_bytes(v, head_dim, values, 1);
}

// scores[r][16 b + t] = q[r] . key(t of block b), summed over d in order.
template <class Cache, int kRows, int kBlocks>
static inline void score_blocks(const float* q, int head_dim, const typename Cache::T* const* keys, float* scores) {
  V16 acc[kRows][kBlocks];
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) acc[r][b] = V16::zero();
  for (int d = 0; d < head_dim; ++d) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const V16 key = Cache::load(keys[b] + (size_t)d * 16);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r][b] = fma(V16::set1(q[(size_t)r * head_dim + d]), key, acc[r][b]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) acc[r][b].store(scores + (size_t)r * kPieceTokens + b * 16);
}

// out[r][columns] = out[r] * alpha[r] + sum over t in order of weight[r][t] * value(t).
template <class Cache, int kRows, int kChunks>
static inline void add_values(const typename Cache::T* const* values, int num_tokens, int padded, int column,
                              const float* weights, const float* alpha, float* out) {
  V16 acc[kRows][kChunks];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c)
      acc[r][c] = V16::load(out + (size_t)r * padded + column + c * 16) * V16::set1(alpha[r]);
  for (int t = 0; t < num_tokens; ++t) {
    const typename Cache::T* value = values[t / 16] + (size_t)(t % 16) * padded + column;
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; ++c) {
      const V16 v = Cache::load(value + c * 16);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r][c] = fma(V16::set1(weights[(size_t)r * kPieceTokens + t]), v, acc[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kChunks; ++c) acc[r][c].store(out + (size_t)r * padded + column + c * 16);
}

struct AttentionRows {  // state of all rows of a tile; row = token * group + head
  float* q;             // [rows][head_dim], scaled
  float* out;           // [rows][padded], not yet divided by `sum`
  float* high;          // [rows] running maximum of the scores
  float* sum;           // [rows] running sum of the weights
};

// Turns a row's scores of one piece into weights and updates its maximum and sum. Returns the factor for
// what the row has gathered so far. Visible tokens are [lo, hi) of the piece.
static inline float soften(float* scores, int lo, int hi, float& high, float& sum) {
  if (lo >= hi) {
    for (int i = 0; i < kPieceTokens; i += 16) V16::zero().store(scores + i);
    return 1.0f;
  }
  V16 top = V16::set1(-INFINITY);
  for (int i = 0; i < kPieceTokens; i += 16) {
    const int from = lo - i < 0 ? 0 : lo - i > 16 ? 16 : lo - i, to = hi - i < 0 ? 0 : hi - i > 16 ? 16 : hi - i;
    const V16 s = from < to ? keep_range(V16::load(scores + i), from, to, -INFINITY) : V16::set1(-INFINITY);
    s.store(scores + i);
    top = max(top, s);
  }
  const float piece_high = hmax(top);
  const float new_high = piece_high > high ? piece_high : high;
  const V16 shift = V16::set1(new_high);
  V16 total = V16::zero();
  for (int i = 0; i < kPieceTokens; i += 16) {
    const V16 w = exp16(V16::load(scores + i) - shift);
    w.store(scores + i);
    total = total + w;
  }
  float lanes[16];
  exp16(V16::set1(high - new_high)).store(lanes);
  const float alpha = lanes[0];
  sum = sum * alpha + hsum(total);
  high = new_high;
  return alpha;
}

// Takes the scale of every token's key (which = 0) into its scores, or of its value (1) into its weights.
template <int kRows>
static inline void scale_blocks(const int8_t* const* keys, int blocks, int head_dim, int which, float* scores) {
  for (int b = 0; b < blocks; ++b) {
    const V16 scale = load_bf16(scales_of<Int8Cache>(keys[b], head_dim) + which * kBlockTokens);
    for (int r = 0; r < kRows; ++r) {
      float* s = scores + (size_t)r * kPieceTokens + b * 16;
      (V16::load(s) * scale).store(s);
    }
  }
}

template <class Cache, int kRows>
static void attend_rows(const AttentionTask& t, const AttentionRows& rows, int row, int piece, int num_tokens,
                        const typename Cache::T* const* keys, const typename Cache::T* const* values, float* scores) {
  const int blocks = (num_tokens + 15) / 16, padded = (t.head_dim + 15) / 16 * 16;
  const float* q = rows.q + (size_t)row * t.head_dim;
  int b = 0;
  for (; b + kScoreBlocks <= blocks; b += kScoreBlocks)
    score_blocks<Cache, kRows, kScoreBlocks>(q, t.head_dim, keys + b, scores + b * 16);
  for (; b < blocks; ++b) score_blocks<Cache, kRows, 1>(q, t.head_dim, keys + b, scores + b * 16);
  if constexpr (std::is_same_v<Cache, Int8Cache>) scale_blocks<kRows>(keys, blocks, t.head_dim, 0, scores);

  float alpha[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int position = t.first_pos + (row + r) / t.group;
    const int first = t.window > 0 && position - t.window + 1 > 0 ? position - t.window + 1 : 0;
    const int lo = first - piece, hi = position + 1 - piece;
    alpha[r] = soften(scores + (size_t)r * kPieceTokens, lo < 0 ? 0 : lo, hi > kPieceTokens ? kPieceTokens : hi,
                      rows.high[row + r], rows.sum[row + r]);
  }
  if constexpr (std::is_same_v<Cache, Int8Cache>) scale_blocks<kRows>(keys, blocks, t.head_dim, 1, scores);
  float* out = rows.out + (size_t)row * padded;
  int column = 0;
  for (; column + kValueChunks * 16 <= padded; column += kValueChunks * 16)
    add_values<Cache, kRows, kValueChunks>(values, num_tokens, padded, column, scores, alpha, out);
  for (; column < padded; column += 16)
    add_values<Cache, kRows, 1>(values, num_tokens, padded, column, scores, alpha, out);
}

template <class Cache>
static void attend(const AttentionTask& t, float* scratch) {
  using T = typename Cache::T;
  const int num_rows = t.num_tokens * t.group, padded = (t.head_dim + 15) / 16 * 16;
  AttentionRows rows;
  float* scores = scratch;
  rows.high = scores + (size_t)kRowsAtOnce * kPieceTokens;
  rows.sum = rows.high + num_rows;
  rows.q = rows.sum + num_rows;
  rows.out = rows.q + (size_t)num_rows * t.head_dim;
  for (int r = 0; r < num_rows; ++r) {
    const float* q = t.q + (size_t)(r / t.group) * t.ldq + (size_t)(r % t.group) * t.head_dim;
    for (int d = 0; d < t.head_dim; ++d) rows.q[(size_t)r * t.head_dim + d] = q[d] * t.scale;
    rows.high[r] = -INFINITY;
    rows.sum[r] = 0.0f;
    for (int d = 0; d < padded; ++d) rows.out[(size_t)r * padded + d] = 0.0f;
  }

  const int last_pos = t.first_pos + t.num_tokens - 1;
  const int first_seen = t.window > 0 && t.first_pos - t.window + 1 > 0 ? t.first_pos - t.window + 1 : 0;
  for (int piece = first_seen / kPieceTokens * kPieceTokens; piece <= last_pos; piece += kPieceTokens) {
    const int num_tokens = last_pos + 1 - piece < kPieceTokens ? last_pos + 1 - piece : kPieceTokens;
    const T* keys[kPieceBlocks];
    const T* values[kPieceBlocks];
    for (int b = 0; b < (num_tokens + 15) / 16; ++b) {
      keys[b] = (const T*)(t.kv + (size_t)t.block_ids[piece / 16 + b] * t.block_stride);
      values[b] = keys[b] + (size_t)t.head_dim * 16;
    }
    int row = 0;
    for (; row + 4 <= num_rows; row += 4) attend_rows<Cache, 4>(t, rows, row, piece, num_tokens, keys, values, scores);
    switch (num_rows - row) {
      case 3:
        attend_rows<Cache, 3>(t, rows, row, piece, num_tokens, keys, values, scores);
        break;
      case 2:
        attend_rows<Cache, 2>(t, rows, row, piece, num_tokens, keys, values, scores);
        break;
      case 1:
        attend_rows<Cache, 1>(t, rows, row, piece, num_tokens, keys, values, scores);
        break;
      default:
        break;
    }
  }
  for (int r = 0; r < num_rows; ++r) {
    float* out = t.out + (size_t)(r / t.group) * t.ldo + (size_t)(r % t.group) * t.head_dim;
    const float inverse = 1.0f / rows.sum[r];
    for (int d = 0; d < t.head_dim; ++d) out[d] = rows.out[(size_t)r * padded + d] * inverse;
  }
}

static size_t row_scratch_bytes(int group, int head_dim) {
  const size_t rows = (size_t)kTileTokens * group;
  return 4 * ((size_t)kRowsAtOnce * kPieceTokens + rows * (2 + (size_t)head_dim + (head_dim + 15) / 16 * 16));
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

#if !defined(OCTAVO_ISA_AMX) && !defined(OCTAVO_ISA_VNNI)
static void store_kv(const float* k, const float* v, int head_dim, KvType type, uint8_t* kv, int offset) {
  store_kv_rows(k, v, head_dim, type, kv, offset);
}

static size_t attention_scratch_bytes(int group, int head_dim) { return row_scratch_bytes(group, head_dim); }

static void attention(const AttentionTask& task, KvType type, void* scratch) {
  attention_rows(task, type, (float*)scratch);
}
#endif
