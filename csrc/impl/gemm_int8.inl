// Matrix product with 8-bit dot products (vpdpbusd) for 4- and 8-bit weight formats.
//
// prepare_row turns each 32 values of a row into signed bytes and one scale (largest magnitude / 127). A few channels
// of a transformer carry values many times larger than the rest; alone they would cost their group most of its
// resolution, and make most of the error of the whole product. Such groups get second bytes, for what the first
// left over. A group of weights is then exact integer arithmetic, and costs per row and column
//
//   y += (sum over k of (q[k] + zero) x[k]) * (weight scale * row scale) + sum x * (min - zero * weight scale)
//
// in the order of the groups, then of the groups with second bytes: which they are, the row alone decides, so there is
// one arithmetic for any number of rows (law 1). Weights stay packed: unpacking a nibble is an `and`, on ports
// that the dot products leave idle, so nothing is written to scratch and two panels stay in the L1 cache while all rows
// meet them.

static constexpr int kQuant = 32;  // values of a row that share a scale
// A group gets second bytes if its largest value exceeds this many times the row's root mean square. On the default
// model 7 to 15 % of the groups do, and they hold half to four fifths of the error: mean coarse KL 0.0008 instead of
// 0.0028.
static constexpr float kLargeValue = 6.0f;

// A prepared row: bf16 values, then the first bytes, then the second, each [K32]; and in `sums`
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
static inline int64_t padded_k(int k) { return (k + 31) / 32 * 32; }
static inline const int8_t* first_bytes(const uint16_t* prepared, int k) {
  return (const int8_t*)(prepared + padded_k(k));
}

static inline V16 load_masked(const float* x, int left) {
  return left >= 16 ? V16::load(x) : left <= 0 ? V16::zero() : V16::load_partial(x, left);
}

// Writes 16 bytes nearest to x * inverse and returns their sum. They lie as the nibbles of a packed word do: of each 8
// k first 0, 4, 1, 5, then 2, 6, 3, 7.
static inline int write_bytes(V16 x, float inverse, int8_t* out, __m512i& q) {
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  q = _mm512_cvtps_epi32((x * V16::set1(inverse)).v);
  _mm_storeu_si128((__m128i*)out, _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(q), order));
  return _mm512_reduce_add_epi32(q);
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
  const int64_t padded = padded_k(k), groups = padded / kQuant;
  float *first = sums, *second = sums + groups, *total32 = second + groups, *total16 = total32 + groups;
  uint32_t* marked = (uint32_t*)(sums + 5 * groups);
  const float large = kLargeValue * root_mean_square(x, k);
  for (int64_t i = 0; i < (groups + 31) / 32; ++i) marked[i] = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const V16 v[2] = {load_masked(x + g * kQuant, k - (int)g * kQuant),
                      load_masked(x + g * kQuant + 16, k - (int)g * kQuant - 16)};
    const float high = hmax({_mm512_max_ps(_mm512_abs_ps(v[0].v), _mm512_abs_ps(v[1].v))});
    const float scale = high / 127.0f, inverse = high > 0.0f ? 127.0f / high : 0.0f;
    first[g] = scale;
    second[g] = 0.0f;
    float total[2];
    for (int h = 0; h < 2; ++h) {
      __m512i q;
      total[h] = scale * (float)write_bytes(v[h], inverse, bytes + g * kQuant + 16 * h, q);
      if (high > large) {  // what is left is at most half a step: again 127 of them
        const V16 left = fma(V16::set1(-scale), {_mm512_cvtepi32_ps(q)}, v[h]);
        second[g] = scale / 254.0f;
        marked[g / 32] |= 1u << (g % 32);
        total[h] += second[g] * (float)write_bytes(left, 254.0f * inverse, bytes + padded + g * kQuant + 16 * h, q);
      }
    }
    total32[g] = total[0] + total[1];
    total16[2 * g] = total[0];
    total16[2 * g + 1] = total[1];
  }
}

// Most rows of a tile: 6 x 2 sums and as many parts leave 8 of 32 registers for operands.
static constexpr int kTileRows8 = 6;

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

static inline __m512i broadcast_bytes(const int8_t* x) {
  int32_t bits;
  memcpy(&bits, x, 4);
  return _mm512_set1_epi32(bits);
}

// How far ahead of its place a stream asks for memory: where it will be in the panels after the ones at work, since a
// thread goes through panels in order; less if that would fill the second cache. Into that cache, whose queue of misses
// is longer than that of the first: one core and weights from memory (Zen 4), 30 us instead of 43 without and 45 into
// the first cache.
static inline size_t prefetch_distance(const PackedMatrix& w, int panels) {
  constexpr size_t kMost = 64 << 10, kWithin = 8 << 10;
  return (size_t)panels * w.panel_bytes <= kMost ? (size_t)panels * w.panel_bytes : kWithin;
}

// The bytes of eight k of a panel: two operands of four k each.
template <Form kForm, bool kPrefetch>
static inline void load_chunk(const uint8_t* panel, int chunk, size_t ahead, __m512i (&w)[2]) {
  const uint8_t* p = panel + (size_t)chunk * (kForm == Form::kQ4 ? 64 : 128);
  if constexpr (kPrefetch) _mm_prefetch((const char*)p + ahead, _MM_HINT_T1);
  if constexpr (kForm == Form::kQ4) {
    const __m512i words = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    w[0] = _mm512_and_si512(words, mask);
    w[1] = _mm512_and_si512(_mm512_srli_epi16(words, 4), mask);
  } else {
    if constexpr (kPrefetch) _mm_prefetch((const char*)p + ahead + 64, _MM_HINT_T1);
    w[0] = _mm512_loadu_si512(p);
    w[1] = _mm512_loadu_si512(p + 64);
  }
}

// part[m][p] = the integer sum of one group of weights and the rows' bytes at x.
template <int kRows, int kPanels, Form kForm, bool kPrefetch>
static inline void multiply_group(const uint8_t* const (&data)[kPanels], const int8_t* x, int64_t ld, int chunk,
                                  int chunks, size_t ahead, __m512i (&part)[kRows][kPanels]) {
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) part[m][p] = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int c = chunk; c < chunk + chunks; ++c) {
    __m512i q[kPanels][2];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) load_chunk<kForm, kPrefetch>(data[p], c, ahead, q[p]);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const __m512i v = broadcast_bytes(x + m * ld + (int64_t)c * 8 + h * 4);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) part[m][p] = _mm512_dpbusd_epi32(part[m][p], q[p][h], v);
      }
  }
}

// Adds what a row's second bytes contribute. Row by row: which groups have them differs from row to row, except for a
// few channels. Integer sums may be split at will, here in two, for their latency.
template <int kPanels, Form kForm>
static inline void add_second_bytes(const LinearArgs& a, const uint8_t* const (&data)[kPanels], int row, int panel,
                                    V16 (&acc)[kPanels]) {
  const PackedMatrix& w = *a.w;
  const int64_t quants = padded_k(w.k) / kQuant;
  const int8_t* x = first_bytes(a.prepared, w.k) + row * a.ld_prepared * 2 + quants * kQuant;
  const RowScales s = row_scales(a.sums + row * a.ld_sums, quants);
  const int chunks = w.group / 8, per_quant = kQuant / w.group;
  for (int64_t word = 0; word < (quants + 31) / 32; ++word) {
    for (uint32_t marked = s.marked[word]; marked != 0; marked &= marked - 1) {
      const int quant = (int)word * 32 + __builtin_ctz(marked);
      for (int g = quant * per_quant; g < (quant + 1) * per_quant; ++g) {
        __m512i part[kPanels][2];
        for (int p = 0; p < kPanels; ++p) part[p][0] = part[p][1] = _mm512_setzero_si512();
        for (int c = g * chunks; c < (g + 1) * chunks; ++c)
#pragma GCC unroll 4
          for (int p = 0; p < kPanels; ++p) {
            __m512i q[2];
            load_chunk<kForm, false>(data[p], c, 0, q);
            part[p][0] = _mm512_dpbusd_epi32(part[p][0], q[0], broadcast_bytes(x + c * 8));
            part[p][1] = _mm512_dpbusd_epi32(part[p][1], q[1], broadcast_bytes(x + c * 8 + 4));
          }
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
          const V16 both = load_scale(w.panel_scales(panel + p), (size_t)g, w.half_scales) * V16::set1(s.second[quant]);
          acc[p] = fma({_mm512_cvtepi32_ps(_mm512_add_epi32(part[p][0], part[p][1]))}, both, acc[p]);
        }
      }
    }
  }
}

template <int kRows, int kPanels, Form kForm, bool kPrefetch>
static inline void int8_tile(const LinearArgs& a, int row, int panel) {
  const PackedMatrix& w = *a.w;
  const int64_t ld = a.ld_prepared * 2, quants = padded_k(w.k) / kQuant;
  const int8_t* x = first_bytes(a.prepared, w.k) + row * ld;
  const float* sums = a.sums + row * a.ld_sums;
  const RowScales s = row_scales(sums, quants);
  const int chunks = w.group / 8;
  const float* total = w.group == kQuant ? s.total32 : s.total16;
  const size_t ahead = prefetch_distance(w, kPanels);
  const uint8_t* data[kPanels];
  for (int p = 0; p < kPanels; ++p) data[p] = w.panel(panel + p);
  V16 acc[kRows][kPanels];
  for (int m = 0; m < kRows; ++m)
    for (int p = 0; p < kPanels; ++p) acc[m][p] = V16::zero();
  for (int g = 0; g < w.groups; ++g) {
    __m512i part[kRows][kPanels];
    if constexpr (kRows >= 5) {  // the rows of the next tile, into the first cache
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        _mm_prefetch((const char*)(x + (kRows + m) * ld + g * chunks * 8), _MM_HINT_T0);
      }
      _mm_prefetch((const char*)(s.first + (kRows + g % kRows) * a.ld_sums) + (g / kRows) * 64, _MM_HINT_T0);
      _mm_prefetch((const char*)(total + (kRows + g % kRows) * a.ld_sums) + (g / kRows) * 64, _MM_HINT_T0);
    }
    multiply_group<kRows, kPanels, kForm, kPrefetch>(data, x, ld, g * chunks, chunks, ahead, part);
    const int quant = g * w.group / kQuant;
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const V16 scale = load_scale(w.panel_scales(panel + p), (size_t)g, w.half_scales);
      V16 offset = w.has_min ? load_scale(w.panel_mins(panel + p), (size_t)g, w.half_scales) : V16::zero();
      if (w.zero != 0) offset = fma(V16::set1(-(float)w.zero), scale, offset);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const V16 both = scale * V16::set1(s.first[m * a.ld_sums + quant]);
        acc[m][p] = fma({_mm512_cvtepi32_ps(part[m][p])}, both, acc[m][p]);
        acc[m][p] = fma(V16::set1(total[m * a.ld_sums + g]), offset, acc[m][p]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) add_second_bytes<kPanels, kForm>(a, data, row + m, panel, acc[m]);
  for (int p = 0; p < kPanels; ++p) {
    const int column = (panel + p) * 16, left = lanes_left(w.n, column);
    for (int m = 0; m < kRows; ++m) {
      if (a.bias) acc[m][p] = acc[m][p] + V16::load_partial(a.bias + column, left);
      acc[m][p].store_partial(a.y + (size_t)(row + m) * a.ldy + (panel + p - a.first_panel) * 16, left);
    }
  }
}

// Two panels with every row; with one or two rows four, whose streams memory answers 10 % faster together.
template <Form kForm>
static void linear_int8(const LinearArgs& a, int panel_begin, int panel_end) {
  int p = panel_begin;
  if (a.rows <= 2)
    for (; p + 4 <= panel_end; p += 4)
      a.rows == 1 ? int8_tile<1, 4, kForm, true>(a, 0, p) : int8_tile<2, 4, kForm, true>(a, 0, p);
  const auto panels = [&](auto count) {
    in_row_tiles(a.rows, [&](int row, auto rows) {
      // High tiles are bound by arithmetic: asking for memory ahead would only cost them.
      int8_tile<rows.value, count.value, kForm, (rows.value <= 4)>(a, row, p);
    });
  };
  for (; p + 2 <= panel_end; p += 2) panels(std::integral_constant<int, 2>{});
  for (; p < panel_end; ++p) panels(std::integral_constant<int, 1>{});
}

static Preparation preparation(const PackedMatrix& w) {
  switch (w.form) {
    case Form::kQ4:
    case Form::kQ8x4:
      return kAsInt8;
    case Form::kBF16:
      return kAsBf16;
    default:
      return kAsFloat;
  }
}

static void prepare_row(const float* x, int k, int preparation, uint16_t* prepared, float* sums) {
  if (preparation & kAsBf16) prepare_row_bf16(x, k, prepared, sums);  // its sums are for quantised weights: unused here
  if (preparation & kAsInt8) prepare_row_int8(x, k, (int8_t*)first_bytes(prepared, k), sums);
}

static void linear(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  if (a.w->form == Form::kQ4) return linear_int8<Form::kQ4>(a, panel_begin, panel_end);
  if (a.w->form == Form::kQ8x4) return linear_int8<Form::kQ8x4>(a, panel_begin, panel_end);
  if (a.w->form == Form::kBF16) return linear_bf16(a, panel_begin, panel_end, scratch);
  linear_f32(a, panel_begin, panel_end, scratch);
}
