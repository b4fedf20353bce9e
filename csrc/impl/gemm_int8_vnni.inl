// 8-bit products by vpdpbusd, four k at a time into 32-bit sums. It takes unsigned weights; what that adds to a signed
// one (`zero` times the sum of x) is taken away with the minimum.

static inline __m512i broadcast_bytes(const int8_t* x) {
  int32_t bits;
  memcpy(&bits, x, 4);
  return _mm512_set1_epi32(bits);
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
template <int kRows, int kPanels, Form kForm, int kChunks, bool kPrefetch>
static inline void multiply_group(const uint8_t* const (&data)[kPanels], const int8_t* x, int64_t ld, int chunk,
                                  size_t ahead, __m512i (&part)[kRows][kPanels]) {
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) part[m][p] = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int c = chunk; c < chunk + kChunks; ++c) {
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
template <int kPanels, Form kForm, int kChunks>
static inline void add_second_bytes(const LinearArgs& a, const uint8_t* const (&data)[kPanels], int row, int panel,
                                    V16 (&acc)[kPanels]) {
  const PackedMatrix& w = *a.w;
  const int64_t quants = padded32(w.k) / kQuant;
  const int8_t* x = first_bytes(a.prepared, w.k) + row * a.ld_prepared * 2 + quants * kQuant;
  const RowScales s = row_scales(a.sums + row * a.ld_sums, quants);
  constexpr int kPerQuant = kQuant / (kChunks * 8);
  for (int64_t word = 0; word < (quants + 31) / 32; ++word) {
    for (uint32_t marked = s.marked[word]; marked != 0; marked &= marked - 1) {
      const int quant = (int)word * 32 + __builtin_ctz(marked);
      for (int g = quant * kPerQuant; g < (quant + 1) * kPerQuant; ++g) {
        __m512i part[kPanels][2];
        for (int p = 0; p < kPanels; ++p) part[p][0] = part[p][1] = _mm512_setzero_si512();
        for (int c = g * kChunks; c < (g + 1) * kChunks; ++c)
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

template <int kRows, int kPanels, Form kForm, int kChunks, bool kPrefetch>
static inline void int8_tile(const LinearArgs& a, int row, int panel) {
  const PackedMatrix& w = *a.w;
  const int64_t ld = a.ld_prepared * 2, quants = padded32(w.k) / kQuant;
  const int8_t* x = first_bytes(a.prepared, w.k) + row * ld;
  const float* sums = a.sums + row * a.ld_sums;
  const RowScales s = row_scales(sums, quants);
  const float* total = kChunks * 8 == kQuant ? s.total32 : s.total16;
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
        _mm_prefetch((const char*)(x + (kRows + m) * ld + g * kChunks * 8), _MM_HINT_T0);
      }
      _mm_prefetch((const char*)(s.first + (kRows + g % kRows) * a.ld_sums) + (g / kRows) * 64, _MM_HINT_T0);
      _mm_prefetch((const char*)(total + (kRows + g % kRows) * a.ld_sums) + (g / kRows) * 64, _MM_HINT_T0);
    }
    multiply_group<kRows, kPanels, kForm, kChunks, kPrefetch>(data, x, ld, g * kChunks, ahead, part);
    const int quant = g * kChunks * 8 / kQuant;
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
  for (int m = 0; m < kRows; ++m) add_second_bytes<kPanels, kForm, kChunks>(a, data, row + m, panel, acc[m]);
  for (int p = 0; p < kPanels; ++p) {
    const int column = (panel + p) * 16, left = lanes_left(w.n, column);
    for (int m = 0; m < kRows; ++m) {
      if (a.bias) acc[m][p] = acc[m][p] + V16::load_partial(a.bias + column, left);
      acc[m][p].store_partial(a.y + (size_t)(row + m) * a.ldy + (panel + p - a.first_panel) * 16, left);
    }
  }
}

// Two panels with every row; with one or two rows four, whose streams memory answers 10 % faster together.
template <Form kForm, int kChunks>
static void linear_in_groups(const LinearArgs& a, int panel_begin, int panel_end) {
  int p = panel_begin;
  if (a.rows <= 2)
    for (; p + 4 <= panel_end; p += 4)
      a.rows == 1 ? int8_tile<1, 4, kForm, kChunks, true>(a, 0, p) : int8_tile<2, 4, kForm, kChunks, true>(a, 0, p);
  const auto panels = [&](auto count) {
    in_row_tiles(a.rows, [&](int row, auto rows) {
      // The first tile asks for the next panels; the others find theirs in the cache.
      row == 0 ? int8_tile<rows.value, count.value, kForm, kChunks, true>(a, row, p)
               : int8_tile<rows.value, count.value, kForm, kChunks, false>(a, row, p);
    });
  };
  for (; p + 2 <= panel_end; p += 2) panels(std::integral_constant<int, 2>{});
  for (; p < panel_end; ++p) panels(std::integral_constant<int, 1>{});
}

template <Form kForm>
static void linear_int8(const LinearArgs& a, int panel_begin, int panel_end) {
  a.w->group == kQuant ? linear_in_groups<kForm, 4>(a, panel_begin, panel_end)
                       : linear_in_groups<kForm, 2>(a, panel_begin, panel_end);
}
