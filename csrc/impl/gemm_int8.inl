// Matrix products in 8 bits for 4- and 8-bit weight formats: how a row is prepared for them. What multiplies is in
// gemm_int8_vnni.inl and gemm_int8_avx2.inl.
//
// prepare_row turns each 32 values of a row into signed bytes and one scale (largest magnitude / 127). A few channels
// of a transformer carry values many times larger than the rest; alone they would cost their group most of its
// resolution, and make most of the error of the whole product. Such groups get second bytes, for what the first
// left over. A group of weights is then exact integer arithmetic, and costs per row and column
//
//   y += (sum over k of q[k] x[k]) * (weight scale * row scale) + sum x * min
//
// in the order of the groups, then of the groups with second bytes: which they are, the row alone decides, so there is
// one arithmetic for any number of rows (law 1). Weights stay packed: unpacking a nibble is an `and`, on ports
// that the products leave idle, so nothing is written to scratch and the panels at work stay in the L1 cache while
// all rows meet them.

static constexpr int kQuant = 32;  // values of a row that share a scale
// A group gets second bytes if its largest value exceeds this many times the row's root mean square. On the default
// model 7 to 15 % of the groups do, and they hold half to four fifths of the error: mean coarse KL 0.0008 instead of
// 0.0028.
static constexpr float kLargeValue = 6.0f;

// A prepared row: bf16 values where there are products of them, then the first bytes, then the second, each [K32]; and
// in `sums`
struct RowScales {
  const float* first;      // [groups of 32] scale of the first bytes
  const float* second;     // [groups of 32] scale of the second bytes
  const float* total32;    // [groups of 32] sum of what the bytes stand for
  const float* total16;    // [groups of 16] the same
  const uint32_t* marked;  // [groups of 32 / 32] bit g: the group has second bytes
};
static inline RowScales row_scales(const float* sums, int64_t groups) {
  return {sums, sums + groups, sums + 2 * groups, sums + 3 * groups, (const uint32_t*)(sums + 5 * groups)};
}
static inline const int8_t* first_bytes(const uint16_t* prepared, int k) {
#if defined(OCTAVO_ISA_BF16)
  return (const int8_t*)(prepared + padded32(k));
#else
  return (void)k, (const int8_t*)prepared;
#endif
}

static inline V16 load_masked(const float* x, int left) {
  return left >= 16 ? V16::load(x) : left <= 0 ? V16::zero() : V16::load_partial(x, left);
}

// Writes 16 integers as bytes. They lie as the nibbles of a packed word do: of each 8 k first 0, 4, 1, 5, then 2, 6,
// 3, 7.
static inline void store_in_order(V16 q, int8_t* out) {
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
#if defined(OCTAVO_ISA_AVX512)
  const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(q.v));
#else
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(q.a), _mm256_cvtps_epi32(q.b));  // 0-3 8-11 4-7 12-15
  const __m256i sorted = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(sorted), _mm256_extracti128_si256(sorted, 1));
#endif
  _mm_storeu_si128((__m128i*)out, _mm_shuffle_epi8(bytes, order));
}

// Writes the bytes nearest to x * inverse, leaves them in q and returns their sum.
static inline float write_bytes(V16 x, float inverse, int8_t* out, V16& q) {
  q = round_nearest(x * V16::set1(inverse));
  store_in_order(q, out);
  return hsum(q);
}

static float root_mean_square(const float* x, int k) {
  V16 sum = V16::zero();
  for (int i = 0; i < k; i += 16) {
    const V16 v = load_masked(x + i, k - i);
    sum = fma(v, v, sum);
  }
  return std::sqrt(hsum(sum) / (float)k);
}

static void prepare_row_int8(const float* x, int k, int8_t* bytes, float* sums) {
  const int64_t padded = padded32(k), groups = padded / kQuant;
  float *first = sums, *second = sums + groups, *total32 = second + groups, *total16 = total32 + groups;
  uint32_t* marked = (uint32_t*)(sums + 5 * groups);
  const float large = kLargeValue * root_mean_square(x, k);
  for (int64_t i = 0; i < (groups + 31) / 32; ++i) marked[i] = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const V16 v[2] = {load_masked(x + g * kQuant, k - (int)g * kQuant),
                      load_masked(x + g * kQuant + 16, k - (int)g * kQuant - 16)};
    const float high = hmax(max(max(v[0], V16::zero() - v[0]), max(v[1], V16::zero() - v[1])));
    const float scale = high / 127.0f, inverse = high > 0.0f ? 127.0f / high : 0.0f;
    first[g] = scale;
    second[g] = 0.0f;
    float total[2];
    for (int h = 0; h < 2; ++h) {
      V16 q;
      total[h] = scale * write_bytes(v[h], inverse, bytes + g * kQuant + 16 * h, q);
      if (high > large) {  // what is left is at most half a step: again 127 of them
        const V16 left = fma(V16::set1(-scale), q, v[h]);
        second[g] = scale / 254.0f;
        marked[g / 32] |= 1u << (g % 32);
        total[h] += second[g] * write_bytes(left, 254.0f * inverse, bytes + padded + g * kQuant + 16 * h, q);
      }
    }
    total32[g] = total[0] + total[1];
    total16[2 * g] = total[0];
    total16[2 * g + 1] = total[1];
  }
}

// Most rows of a tile. VNNI: 6 x 2 sums and as many parts leave 8 of 32 registers for operands. AVX2: 4 sums and 4
// parts of half a panel leave 8 of 16.
#if defined(OCTAVO_ISA_AVX512)
static constexpr int kTileRows8 = 6;
#else
static constexpr int kTileRows8 = 4;
#endif

// Calls f(first row, number of rows) for the fewest tiles of at most kTileRows8 rows, all nearly as high as each other
// (8 rows as 4 + 4 keep more sums in flight than 6 + 2); the number is a constant.
template <class F>
static inline void in_row_tiles(int rows, const F& f) {
  const int tiles = (rows + kTileRows8 - 1) / kTileRows8;
  for (int t = 0, row = 0; t < tiles; ++t) {
    const int here = (rows - row + tiles - t - 1) / (tiles - t);
    switch (here) {
      case 6:
        f(row, std::integral_constant<int, 6>{});
        break;
      case 5:
        f(row, std::integral_constant<int, 5>{});
        break;
      case 4:
        f(row, std::integral_constant<int, 4>{});
        break;
      case 3:
        f(row, std::integral_constant<int, 3>{});
        break;
      case 2:
        f(row, std::integral_constant<int, 2>{});
        break;
      default:
        f(row, std::integral_constant<int, 1>{});
        break;
    }
    row += here;
  }
}

// How far ahead of its place a stream asks for memory: where it will be in the panels after the ones at work, since a
// thread goes through panels in order; less if that would fill the second cache. Into that cache, whose queue of misses
// is longer than that of the first: one core and weights from memory (Zen 4), 30 us instead of 43 without and 45 into
// the first cache.
static inline size_t prefetch_distance(const PackedMatrix& w, int panels) {
  constexpr size_t kMost = 64 << 10, kWithin = 8 << 10;
  return (size_t)panels * w.panel_bytes <= kMost ? (size_t)panels * w.panel_bytes : kWithin;
}

#if defined(OCTAVO_ISA_VNNI)
#include "gemm_int8_vnni.inl"
#else
#include "gemm_int8_avx2.inl"
#endif

static Preparation preparation(const PackedMatrix& w) {
  switch (w.form) {
    case Form::kQ4:
    case Form::kQ8x4:
      return kAsInt8;
#if defined(OCTAVO_ISA_BF16)
    case Form::kBF16:
      return kAsBf16;
#endif
    default:
      return kAsFloat;
  }
}

static void prepare_row(const float* x, int k, int preparation, uint16_t* prepared, float* sums) {
#if defined(OCTAVO_ISA_BF16)
  if (preparation & kAsBf16) prepare_row_bf16(x, k, prepared, sums);  // its sums are for quantised weights: unused here
#endif
  if (preparation & kAsInt8) prepare_row_int8(x, k, (int8_t*)first_bytes(prepared, k), sums);
}

static void linear(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  if (a.w->form == Form::kQ4) return linear_int8<Form::kQ4>(a, panel_begin, panel_end);
  if (a.w->form == Form::kQ8x4) return linear_int8<Form::kQ8x4>(a, panel_begin, panel_end);
#if defined(OCTAVO_ISA_BF16)
  if (a.w->form == Form::kBF16) return linear_bf16(a, panel_begin, panel_end, scratch);
#endif
  linear_f32(a, panel_begin, panel_end, scratch);
}

#if !defined(OCTAVO_ISA_BF16)
static size_t linear_scratch_bytes(int k) { return (size_t)k * 64; }  // one float panel
#endif
