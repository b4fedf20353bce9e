// 8-bit products by vpdpbusd, four k at a time into 32-bit sums. It takes unsigned weights; what that adds to a signed
// one (`zero` times the sum of x) is where the sums start from, taken away.

static inline __m512i broadcast_bytes(const int8_t* x) {
  int32_t bits;
  memcpy(&bits, x, 4);
  return _mm512_set1_epi32(bits);
}

// The bytes of eight k of a panel: two operands of four k each.
template <Form kForm>
static inline void load_chunk(const uint8_t* panel, int chunk, __m512i (&w)[2]) {
  const uint8_t* p = panel + (size_t)chunk * (kForm == Form::kQ4 ? 64 : 128);
  if constexpr (kForm == Form::kQ4) {
    const __m512i words = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    w[0] = _mm512_and_si512(words, mask);
    w[1] = _mm512_and_si512(_mm512_srli_epi16(words, 4), mask);
  } else {
    w[0] = _mm512_loadu_si512(p);
    w[1] = _mm512_loadu_si512(p + 64);
  }
}

// Adds the products of one group of weights and the rows' bytes at x to part[m][p].
template <int kRows, int kPanels, Form kForm, int kChunks>
static inline void multiply_group(const uint8_t* const (&data)[kPanels], const int8_t* x, int64_t ld, int chunk,
                                  __m512i (&part)[kRows][kPanels]) {
#pragma GCC unroll 4
  for (int c = chunk; c < chunk + kChunks; ++c) {
    __m512i q[kPanels][2];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) load_chunk<kForm>(data[p], c, q[p]);
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

// What all tiles of a wide batch share.
struct WideBatch {
  const __m512i* scales;  // of multiply_scales
  // Lines of the next panels that are still to be asked for: a few with each group, since a burst of them would fill
  // the queue of misses and hold up the products.
  const char *next, *next_end;
};

// Of kPanels panels, the scales times every mantissa of a step, and the minimum: [group][panel][kWideVectors][16].
static constexpr int kWideVectors = kFractions + 1;
template <int kPanels, bool kMin, bool kHalf>
static inline void multiply_scales(const PackedMatrix& w, int panel, __m512i* out) {
  for (int g = 0; g < w.groups; ++g)
    for (int p = 0; p < kPanels; ++p, out += kWideVectors) {
      const V16 scale = load_scale(w.panel_scales(panel + p), (size_t)g, kHalf);
      for (int f = 0; f < kFractions; ++f)
        _mm512_store_ps(out + f, (scale * V16::set1(1.0f + (float)f / kFractions)).v);
      if constexpr (kMin) _mm512_store_ps(out + kFractions, load_scale(w.panel_mins(panel + p), (size_t)g, kHalf).v);
    }
}

// kZero: the packed integer that means 0. kMin: weights have a minimum. kWide: `wide` is there, else null.
template <int kRows, int kPanels, Form kForm, int kChunks, int kZero, bool kMin, bool kHalf, bool kPrefetch, bool kWide>
static inline void int8_tile(const LinearArgs& a, int row, int panel, WideBatch* wide) {
  const PackedMatrix& w = *a.w;
  const int64_t ld = a.ld_prepared * 2;
  const int8_t* x = row_bytes(a.prepared, w.k) + row * ld;
  const RowSums s = row_sums(a.sums + row * a.ld_sums, w.k);
  const float* total = kChunks * 8 == kQuant ? s.total32 : s.total16;
  const int32_t* zeros = kChunks * 8 == kQuant ? s.zeros32 : s.zeros16;
  // Panels at work lie one behind the other, and so do those ahead.
  PanelAhead ahead(w, panel, kPanels);
  const uint8_t* data[kPanels];
  for (int p = 0; p < kPanels; ++p) data[p] = w.panel(panel + p);
  V16 acc[kRows][kPanels];
  for (int m = 0; m < kRows; ++m)
    for (int p = 0; p < kPanels; ++p) acc[m][p] = V16::zero();
  for (int g = 0; g < w.groups; ++g) {
    if constexpr (kPrefetch)
      for (int p = 0; p < kPanels; ++p) ahead.ask();
    if constexpr (kWide) {
      if (wide->next < wide->next_end) {
        _mm_prefetch(wide->next, _MM_HINT_T1);
        _mm_prefetch(wide->next + 64, _MM_HINT_T1);
        wide->next += 128;
      }
    }
    __m512i part[kRows][kPanels];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      __m512i start = _mm512_setzero_si512();
      if constexpr (kZero != 0) start = _mm512_set1_epi32(zeros[m * a.ld_sums + g]);
      if constexpr (kZero == 128) start = _mm512_slli_epi32(start, 4);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) part[m][p] = start;
    }
    multiply_group<kRows, kPanels, kForm, kChunks>(data, x, ld, g * kChunks, part);
    const int quant = g * kChunks * 8 / kQuant;
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      V16 scale = V16::zero(), min = V16::zero();
      const __m512i* const multiplied = kWide ? wide->scales + (g * kPanels + p) * kWideVectors : nullptr;
      if constexpr (!kWide) scale = load_scale(w.panel_scales(panel + p), (size_t)g, kHalf);
      if constexpr (kMin)
        min = kWide ? V16{_mm512_load_ps(multiplied + kFractions)}
                    : load_scale(w.panel_mins(panel + p), (size_t)g, kHalf);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const int64_t at = m * a.ld_sums + quant;
        V16 both;  // the same bits either way
        if constexpr (kWide) {
          const __m512i product = _mm512_load_si512((const char*)multiplied + s.fractions[at]);
          both = {_mm512_castsi512_ps(_mm512_add_epi32(product, _mm512_set1_epi32(s.exponents[at])))};
        } else {
          both = scale * V16::set1(s.steps[at]);
        }
        acc[m][p] = fma({_mm512_cvtepi32_ps(part[m][p])}, both, acc[m][p]);
        if constexpr (kMin) acc[m][p] = fma(V16::set1(total[m * a.ld_sums + g]), min, acc[m][p]);
      }
    }
  }
  for (int p = 0; p < kPanels; ++p) {
    const int column = (panel + p) * 16, left = lanes_left(w.n, column);
    for (int m = 0; m < kRows; ++m) {
      acc[m][p] = acc[m][p] * V16::set1(s.unit[m * a.ld_sums]);
      if (a.bias) acc[m][p] = acc[m][p] + V16::load_partial(a.bias + column, left);
      float* const out = a.y + (size_t)(row + m) * a.ldy + (panel + p - a.first_panel) * 16;
      left == 16 ? acc[m][p].store(out) : acc[m][p].store_partial(out, left);
    }
  }
}

// Adds the products of the rows' large values to what is in y. kWhole: no panel ends early. A masked store would hold
// up the load of the same row's next value.
template <int kPanels, Form kForm, int kChunks, int kZero, bool kHalf, bool kWhole>
static inline void add_large_values(const LinearArgs& a, int panel) {
  const PackedMatrix& w = *a.w;
  const __m512i zero = _mm512_set1_epi32(kZero), mask = _mm512_set1_epi32(kForm == Form::kQ4 ? 15 : 255);
  const uint8_t *data[kPanels], *scales[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    data[p] = w.panel(panel + p);
    scales[p] = w.panel_scales(panel + p);
  }
  float* const y = a.y + (panel - a.first_panel) * 16 - a.first_row * a.ldy;
  for (const LargeValue *v = a.large + a.large_starts[0], *end = a.large + a.large_starts[a.rows]; v != end; ++v) {
    const Place at = place_of<kForm>((uint32_t)v->k);
    const size_t group = (uint32_t)v->k / (kChunks * 8);
    const V16 value = V16::set1(v->value);
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const __m512i words = _mm512_srl_epi32(_mm512_loadu_si512(data[p] + at.offset), _mm_cvtsi32_si128(at.shift));
      const V16 q = {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(words, mask), zero))};
      const V16 weight = q * load_scale(scales[p], group, kHalf);
      float* const out = y + v->row * a.ldy + p * 16;
      if constexpr (kWhole) {
        fma(value, weight, V16::load(out)).store(out);
      } else {
        const int left = lanes_left(w.n, (panel + p) * 16);
        fma(value, weight, V16::load_partial(out, left)).store_partial(out, left);
      }
    }
  }
}

template <int kPanels, Form kForm, int kChunks, int kZero, bool kHalf>
static inline void add_large_values(const LinearArgs& a, int panel) {
  (panel + kPanels) * 16 <= a.w->n ? add_large_values<kPanels, kForm, kChunks, kZero, kHalf, true>(a, panel)
                                   : add_large_values<kPanels, kForm, kChunks, kZero, kHalf, false>(a, panel);
}

// Rows from which on scales are multiplied beforehand.
static constexpr int kWideRows = 24;

// Two panels with every row; with one or two rows four, whose streams memory answers 10 % faster together. Large values
// come last, four panels at a time: what a row's next one adds to must first be stored.
template <Form kForm, int kChunks, int kZero, bool kMin, bool kHalf>
static void linear_in_groups(const LinearArgs& a, int panel_begin, int panel_end, __m512i* scales) {
  int p = panel_begin;
  if (a.rows <= 2)
    for (; p + 4 <= panel_end; p += 4) {
      a.rows == 1 ? int8_tile<1, 4, kForm, kChunks, kZero, kMin, kHalf, true, false>(a, 0, p, nullptr)
                  : int8_tile<2, 4, kForm, kChunks, kZero, kMin, kHalf, true, false>(a, 0, p, nullptr);
    }
  const auto panels = [&](auto count) {
    const char* const next = (const char*)a.w->panel(p + count.value);
    WideBatch wide{scales, next, next + count.value * a.w->panel_bytes};
    if (a.rows >= kWideRows) multiply_scales<count.value, kMin, kHalf>(*a.w, p, scales);
    in_row_tiles<kTileRows8>(a.rows, [&](int row, auto rows) {
      if constexpr (rows.value >= 4) {
        if (a.rows >= kWideRows)
          return int8_tile<rows.value, count.value, kForm, kChunks, kZero, kMin, kHalf, false, true>(a, row, p, &wide);
      }
      // The first tile asks for the next panels; the others find theirs in the cache.
      row == 0
          ? int8_tile<rows.value, count.value, kForm, kChunks, kZero, kMin, kHalf, true, false>(a, row, p, nullptr)
          : int8_tile<rows.value, count.value, kForm, kChunks, kZero, kMin, kHalf, false, false>(a, row, p, nullptr);
    });
  };
  for (; p + 2 <= panel_end; p += 2) panels(std::integral_constant<int, 2>{});
  for (; p < panel_end; ++p) panels(std::integral_constant<int, 1>{});
  if (a.large_starts[0] == a.large_starts[a.rows]) return;
  for (p = panel_begin; p + 4 <= panel_end; p += 4) add_large_values<4, kForm, kChunks, kZero, kHalf>(a, p);
  for (; p < panel_end; ++p) add_large_values<1, kForm, kChunks, kZero, kHalf>(a, p);
}

template <Form kForm>
static void linear_int8(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  __m512i* const scales = (__m512i*)(((uintptr_t)scratch + 63) / 64 * 64);
  const PackedMatrix& w = *a.w;
  const auto run = [&](auto chunks, auto min, auto half) {
    constexpr int kZero = kForm == Form::kQ8x4 ? 128 : min.value ? 0 : 8;
    linear_in_groups<kForm, chunks.value, kZero, min.value, half.value>(a, panel_begin, panel_end, scales);
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  // Groups of 16 are those of K-quants, whose scales are floats.
  if (w.group == kQuant) {
    constexpr std::integral_constant<int, 4> chunks;
    if (!w.has_min) return run(chunks, no, yes);
    return w.half_scales ? run(chunks, yes, yes) : run(chunks, yes, no);
  }
  if constexpr (kForm == Form::kQ8x4) {
    constexpr std::integral_constant<int, 2> chunks;
    return w.has_min ? run(chunks, yes, no) : run(chunks, no, no);
  }
}
