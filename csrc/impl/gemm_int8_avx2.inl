// 8-bit products by vpmaddubsw: unsigned times signed bytes, neighbours added, into 16 bits. A panel is two vectors.
//
// Nibbles are at most 15, so 8 such sums stay below 2^15 (8 * 2 * 15 * 127 = 30,480), and a whole group is added up
// in 16 bits; less its zero times the sum of x, too (16 * 8 * 127 from own products, as much from the other lane's x).
// Bytes go in as magnitudes with their sign moved to x (2 * 128 * 127 = 32,512), and are widened at once.

static constexpr int kHalves = 2;  // of a panel, 8 columns each

static inline __m256i broadcast_bytes(const int8_t* x) {
  int32_t bits;
  memcpy(&bits, x, 4);
  return _mm256_set1_epi32(bits);
}

// Makes the compiler add in the order written. GCC 12 balances the additions of a group like a tree, whose branches do
// not fit into 16 registers: every third instruction moved one to or from the stack (Zen 3, one core, in cache: 150
// instead of 185 GOP/s).
static inline void keep_order(__m256i& x) { asm("" : "+x"(x)); }

// Adds the products of eight k of a panel and kRows rows whose bytes lie at x to `part`: 16-bit sums of neighbours for
// nibbles, 32-bit sums for bytes.
template <int kRows, Form kForm>
static inline void multiply_chunk(const uint8_t* data, const int8_t* x, int64_t ld, __m256i (&part)[kRows][kHalves]) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    __m256i q[kHalves];
#pragma GCC unroll 2
    for (int p = 0; p < kHalves; ++p) {
      if constexpr (kForm == Form::kQ4) {
        const __m256i words = _mm256_loadu_si256((const __m256i*)(data + p * 32));
        q[p] = _mm256_and_si256(h ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi8(15));
      } else {
        q[p] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(data + h * 64 + p * 32)), _mm256_set1_epi8(-128));
      }
    }
    if constexpr (kForm == Form::kQ4) {
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const __m256i v = broadcast_bytes(x + m * ld + h * 4);
#pragma GCC unroll 2
        for (int p = 0; p < kHalves; ++p) {
          part[m][p] = _mm256_add_epi16(part[m][p], _mm256_maddubs_epi16(q[p], v));
          keep_order(part[m][p]);
        }
      }
    } else {
      __m256i magnitude[kHalves];
#pragma GCC unroll 2
      for (int p = 0; p < kHalves; ++p) magnitude[p] = _mm256_abs_epi8(q[p]);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const __m256i v = broadcast_bytes(x + m * ld + h * 4);
#pragma GCC unroll 2
        for (int p = 0; p < kHalves; ++p) {
          const __m256i pairs = _mm256_maddubs_epi16(magnitude[p], _mm256_sign_epi8(v, q[p]));
          part[m][p] = _mm256_add_epi32(part[m][p], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
          keep_order(part[m][p]);
        }
      }
    }
  }
}

// The sums of a group as floats.
template <Form kForm>
static inline __m256 group_sum(__m256i part) {
  if constexpr (kForm == Form::kQ4) part = _mm256_madd_epi16(part, _mm256_set1_epi16(1));
  return _mm256_cvtepi32_ps(part);
}

static inline __m256 load_half_scale(const uint8_t* p, size_t index, int half, bool half_scales) {
  const size_t at = index * 16 + (size_t)half * 8;
  return half_scales ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)((const uint16_t*)p + at)))
                     : _mm256_loadu_ps((const float*)p + at);
}

static inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
// Whole vectors without a mask: a masked store would hold up a load of the same place.
static inline __m256 load_some(const float* p, int n) {
  return n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, first_lanes(n));  // n may be negative
}
static inline void store_some(__m256 x, float* p, int n) {
  n >= 8 ? _mm256_storeu_ps(p, x) : _mm256_maskstore_ps(p, first_lanes(n), x);
}

template <int kRows, Form kForm, int kChunks, bool kMin, bool kHalfScales, bool kPrefetch>
static inline void int8_tile(const LinearArgs& a, int row, int panel) {
  constexpr int kGroupsPerQuant = kQuant / (kChunks * 8), kChunkBytes = kForm == Form::kQ4 ? 64 : 128;
  const PackedMatrix& w = *a.w;
  const int64_t ld = a.ld_prepared / kValuesPerQuant;
  const Quant* x = row_quants(a.prepared + row * a.ld_prepared, w.k);
  PanelAhead ahead(w, panel, 2);
  const uint8_t *data = w.panel(panel), *scales = w.panel_scales(panel), *mins = w.panel_mins(panel);
  __m256 sums[kRows][kHalves];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
    for (int p = 0; p < kHalves; ++p) sums[m][p] = _mm256_setzero_ps();
  for (int quant = 0; quant < w.groups / kGroupsPerQuant; ++quant, ++x)
#pragma GCC unroll 2
    for (int half = 0; half < kGroupsPerQuant; ++half) {
      const size_t g = (size_t)quant * kGroupsPerQuant + half;
      if constexpr (kPrefetch) ahead.ask();
      __m256i part[kRows][kHalves];
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        // What the nibbles' zero adds to a sum is where it starts from, taken away; it may wrap around on the way.
        __m256i start = _mm256_setzero_si256();
        if constexpr (kForm == Form::kQ4 && !kMin)
          start = _mm256_and_si256(_mm256_set1_epi32(x[m * ld].zero), _mm256_set1_epi32(0xffff));
#pragma GCC unroll 2
        for (int p = 0; p < kHalves; ++p) part[m][p] = start;
      }
#pragma GCC unroll 4
      for (int c = 0; c < kChunks; ++c, data += kChunkBytes)
        multiply_chunk<kRows, kForm>(data, x->bytes + half * 16 + c * 8, ld * (int64_t)sizeof(Quant), part);
      __m256 scale[kHalves], min[kHalves];
#pragma GCC unroll 2
      for (int p = 0; p < kHalves; ++p) {
        scale[p] = load_half_scale(scales, g, p, kHalfScales);
        if constexpr (kMin) min[p] = load_half_scale(mins, g, p, kHalfScales);
      }
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const Quant& q = x[m * ld];
        const __m256 step = _mm256_set1_ps(q.step);
        const float total = kGroupsPerQuant == 1 ? q.total : q.total16[half];
#pragma GCC unroll 2
        for (int p = 0; p < kHalves; ++p) {
          sums[m][p] = _mm256_fmadd_ps(group_sum<kForm>(part[m][p]), _mm256_mul_ps(scale[p], step), sums[m][p]);
          if constexpr (kMin) sums[m][p] = _mm256_fmadd_ps(_mm256_set1_ps(total), min[p], sums[m][p]);
        }
      }
    }
  for (int p = 0; p < kHalves; ++p) {
    const int column = panel * 16 + p * 8, left = w.n - column < 8 ? w.n - column : 8;
    for (int m = 0; m < kRows; ++m) {
      const float unit = ((const RowRest*)(a.sums + (row + m) * a.ld_sums))->unit;
      const __m256 y = _mm256_mul_ps(sums[m][p], _mm256_set1_ps(unit));
      float* out = a.y + (size_t)(row + m) * a.ldy + (panel - a.first_panel) * 16 + p * 8;
      store_some(a.bias ? _mm256_add_ps(y, load_some(a.bias + column, left)) : y, out, left);
    }
  }
}

template <Form kForm, int kChunks, bool kMin, bool kHalfScales>
static void linear_in_groups(const LinearArgs& a, int panel_begin, int panel_end, uint8_t* scratch) {
  const auto panels = [&](int panel, auto count) {
    for (int p = panel; p < panel + count.value; ++p)
      in_row_tiles<kTileRows8>(a.rows, [&](int row, auto rows) {
        row == 0 ? int8_tile<rows.value, kForm, kChunks, kMin, kHalfScales, true>(a, row, p)
                 : int8_tile<rows.value, kForm, kChunks, kMin, kHalfScales, false>(a, row, p);
      });
    add_large_values<count.value, kForm, kChunks, kHalfScales>(a, panel, (float*)scratch);
  };
  int p = panel_begin;
  for (; p + 2 <= panel_end; p += 2) panels(p, std::integral_constant<int, 2>{});
  if (p < panel_end) panels(p, std::integral_constant<int, 1>{});
}
