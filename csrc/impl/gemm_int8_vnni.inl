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

// Keeps the compiler from loading what lies at p before it has `sum`. GCC 12 loaded the weights of all chunks first,
// for which there are not enough registers, and moved every third vector to the stack and back.
static inline void load_after(const uint8_t*& p, __m512i& sum) { asm("" : "+r"(p), "+v"(sum)); }

// Adds the products of one group of weights and the rows' bytes at x, `ld` apart, to part[m][p].
template <int kRows, int kPanels, Form kForm, int kChunks>
static inline void multiply_group(const uint8_t* (&data)[kPanels], const int8_t* x, int64_t ld,
                                  __m512i (&part)[kRows][kPanels]) {
#pragma GCC unroll 4
  for (int c = 0; c < kChunks; ++c) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) load_after(data[p], part[kRows - 1][p]);
    __m512i q[kPanels][2];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) load_chunk<kForm>(data[p], c, q[p]);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const __m512i v = broadcast_bytes(x + m * ld + c * 8 + h * 4);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) part[m][p] = _mm512_dpbusd_epi32(part[m][p], q[p][h], v);
      }
  }
}

// Whether a wide batch multiplies scales by each mantissa of a step beforehand. Where bf16 is, there is Zen, whose
// integer additions have ports of their own. On Intel's cores they and products share theirs, so a product with the
// step itself costs no more, and a wide batch is 3 to 10 % faster without the tables (Emerald Rapids, one core, in
// cache).
#if defined(OCTAVO_ISA_BF16)
static constexpr bool kAddExponents = true;
#else
static constexpr bool kAddExponents = false;
#endif
static constexpr int kScaleVectors = kAddExponents ? kFractions : 1;
static constexpr int kWideVectors = kScaleVectors + 1;

// Most panels and rows of a wide batch's tile: 6 x 2 sums and as many parts leave 8 of 32 registers for operands, one
// less than unpacking needs.
static constexpr int kWidePanels = 2, kWideTileRows = 6;

// What all tiles of a wide batch share: of kPanels panels, their nibbles as bytes and their scales as floats.
struct WideBatch {
  const uint8_t* bytes;   // [panel], laid out as kQ8x4; kQ4 only
  const __m512i* scales;  // [group][panel]: kScaleVectors of scales, one of minimums
  // Lines of the next panels that are still to be asked for: a few with each group, since a burst of them would fill
  // the queue of misses and hold up the products.
  const char *next, *next_end;
};

// With kAddExponents, a scale is there for each mantissa, multiplied by it but less its bits: adding the bits of a step
// to it makes the product with the step (its exponent is added, its mantissa makes up for what is missing).
template <int kPanels, bool kMin, bool kHalf>
static inline void widen_scales(const PackedMatrix& w, int panel, __m512i* out) {
  const uint8_t *scales[kPanels], *mins[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    scales[p] = w.panel_scales(panel + p);
    mins[p] = w.panel_mins(panel + p);
  }
  for (int g = 0; g < w.groups; ++g)
    for (int p = 0; p < kPanels; ++p, out += kWideVectors) {
      const V16 scale = load_scale(scales[p], (size_t)g, kHalf);
      if constexpr (kAddExponents) {
        for (int f = 0; f < kFractions; ++f) {
          const V16 mantissa = V16::set1(1.0f + (float)f / kFractions);
          const __m512i product = _mm512_castps_si512((scale * mantissa).v);
          _mm512_store_si512(out + f, _mm512_sub_epi32(product, _mm512_castps_si512(mantissa.v)));
        }
      } else {
        _mm512_store_ps(out, scale.v);
      }
      if constexpr (kMin) _mm512_store_ps(out + kScaleVectors, load_scale(mins[p], (size_t)g, kHalf).v);
    }
}

static inline void unpack_nibbles(const PackedMatrix& w, int panel, uint8_t* out) {
  const uint8_t* const data = w.panel(panel);
  for (int c = 0; c < w.k / 8; ++c, out += 128) {
    __m512i q[2];
    load_chunk<Form::kQ4>(data, c, q);
    _mm512_store_si512(out, q[0]);
    _mm512_store_si512(out + 64, q[1]);
  }
}

// kZero: the packed integer that means 0. kMin: weights have a minimum. kHalf: scales are halves, which `wide` has as
// floats. kWide: `wide` is there, else null.
template <int kRows, int kPanels, Form kForm, int kChunks, int kZero, bool kMin, bool kHalf, bool kPrefetch, bool kWide>
static inline void int8_tile(const LinearArgs& a, int row, int panel, WideBatch* wide) {
  constexpr Form kBytes = kWide ? Form::kQ8x4 : kForm;
  constexpr int kGroupsPerQuant = kQuant / (kChunks * 8), kChunkBytes = kBytes == Form::kQ4 ? 64 : 128;
  const PackedMatrix& w = *a.w;
  const int64_t ld = a.ld_prepared / kValuesPerQuant;
  const Quant* x = row_quants(a.prepared + row * a.ld_prepared, w.k);
  // Panels at work lie one behind the other, and so do those ahead.
  PanelAhead ahead(w, panel, kPanels);
  const uint8_t *data[kPanels], *scales[kPanels], *mins[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    data[p] = kWide && kForm == Form::kQ4 ? wide->bytes + (size_t)p * w.k * 16 : w.panel(panel + p);
    scales[p] = w.panel_scales(panel + p);
    mins[p] = w.panel_mins(panel + p);
  }
  const __m512i* widened = kWide ? wide->scales : nullptr;
  const char *next = kWide ? wide->next : nullptr, *const next_end = kWide ? wide->next_end : nullptr;
  V16 acc[kRows][kPanels];
  for (int m = 0; m < kRows; ++m)
    for (int p = 0; p < kPanels; ++p) acc[m][p] = V16::zero();
  for (int quant = 0; quant < w.groups / kGroupsPerQuant; ++quant, ++x)
#pragma GCC unroll 2
    for (int half = 0; half < kGroupsPerQuant; ++half) {
      const size_t g = (size_t)quant * kGroupsPerQuant + half;
      if constexpr (kPrefetch)
        for (int p = 0; p < kPanels; ++p) ahead.ask();
      if constexpr (kWide) {
        if (next < next_end) {
          _mm_prefetch(next, _MM_HINT_T1);
          _mm_prefetch(next + 64, _MM_HINT_T1);
          next += 128;
        }
      }
      __m512i part[kRows][kPanels];
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const Quant& q = x[m * ld];
        __m512i start = _mm512_setzero_si512();
        if constexpr (kZero != 0) start = _mm512_set1_epi32(kGroupsPerQuant == 1 ? q.zero : q.zero16[half]);
        if constexpr (kZero == 128) start = _mm512_slli_epi32(start, 4);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) part[m][p] = start;
      }
      multiply_group<kRows, kPanels, kBytes, kChunks>(data, x->bytes + half * 16, ld * (int64_t)sizeof(Quant), part);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        data[p] += kChunks * kChunkBytes;
        V16 scale = V16::zero(), min = V16::zero();
        if constexpr (!kWide)
          scale = load_scale(scales[p], g, kHalf);
        else if constexpr (!kAddExponents)
          scale = {_mm512_load_ps(widened)};
        if constexpr (kMin) min = kWide ? V16{_mm512_load_ps(widened + kScaleVectors)} : load_scale(mins[p], g, kHalf);
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
          const Quant& q = x[m * ld];
          V16 both;  // the same bits either way
          if constexpr (kWide && kAddExponents) {
            const __m512i product = _mm512_load_si512((const char*)widened + q.fraction);
            both = {_mm512_castsi512_ps(_mm512_add_epi32(product, _mm512_castps_si512(_mm512_set1_ps(q.step))))};
          } else {
            both = scale * V16::set1(q.step);
          }
          acc[m][p] = fma({_mm512_cvtepi32_ps(part[m][p])}, both, acc[m][p]);
          if constexpr (kMin)
            acc[m][p] = fma(V16::set1(kGroupsPerQuant == 1 ? q.total : q.total16[half]), min, acc[m][p]);
        }
        if constexpr (kWide) widened += kWideVectors;
      }
    }
  if constexpr (kWide) wide->next = next;
  for (int p = 0; p < kPanels; ++p) {
    const int column = (panel + p) * 16, left = lanes_left(w.n, column);
    for (int m = 0; m < kRows; ++m) {
      acc[m][p] = acc[m][p] * V16::set1(((const RowRest*)(a.sums + (row + m) * a.ld_sums))->unit);
      if (a.bias) acc[m][p] = acc[m][p] + V16::load_partial(a.bias + column, left);
      float* const out = a.y + (size_t)(row + m) * a.ldy + (panel + p - a.first_panel) * 16;
      left == 16 ? acc[m][p].store(out) : acc[m][p].store_partial(out, left);
    }
  }
}

// Rows from which on nibbles are unpacked and scales widened beforehand.
static constexpr int kWideRows = 24;

template <int kPanels, Form kForm, int kChunks, int kZero, bool kMin, bool kHalf>
static void multiply_wide(const LinearArgs& a, int panel, uint8_t* scratch) {
  const PackedMatrix& w = *a.w;
  __m512i* const scales = (__m512i*)scratch;
  uint8_t* const bytes = scratch + (size_t)w.groups * kPanels * kWideVectors * 64;
  widen_scales<kPanels, kMin, kHalf>(w, panel, scales);
  if constexpr (kForm == Form::kQ4)
    for (int p = 0; p < kPanels; ++p) unpack_nibbles(w, panel + p, bytes + (size_t)p * w.k * 16);
  const char* const next = (const char*)w.panel(panel + kPanels);
  WideBatch wide{bytes, scales, next, next + kPanels * w.panel_bytes};
  in_row_tiles<kWideTileRows>(a.rows, [&](int row, auto rows) {
    if constexpr (rows.value >= kWideTileRows - 1)  // as all tiles of so many rows are
      int8_tile<rows.value, kPanels, kForm, kChunks, kZero, kMin, false, false, true>(a, row, panel, &wide);
  });
}

// The first tile asks for the next panels; the others find theirs in the cache. (A last, single panel is too rare for
// kernels of its own.)
template <int kPanels, Form kForm, int kChunks, int kZero, bool kMin, bool kHalf>
static void multiply_thin(const LinearArgs& a, int panel) {
  in_row_tiles<kTileRows8>(a.rows, [&](int row, auto rows) {
    if (kPanels == 1 || row == 0)
      int8_tile<rows.value, kPanels, kForm, kChunks, kZero, kMin, kHalf, true, false>(a, row, panel, nullptr);
    else if constexpr (kPanels > 1)
      int8_tile<rows.value, kPanels, kForm, kChunks, kZero, kMin, kHalf, false, false>(a, row, panel, nullptr);
  });
}

// Two panels with every row; with one or two rows four, whose streams memory answers 10 % faster together.
template <Form kForm, int kChunks, bool kMin, bool kHalf>
static void linear_in_groups(const LinearArgs& a, int panel_begin, int panel_end, uint8_t* scratch) {
  constexpr int kZero = kForm == Form::kQ8x4 ? 128 : kMin ? 0 : 8;
  int p = panel_begin;
  if (a.rows <= 2)
    for (; p + 4 <= panel_end; p += 4) {
      a.rows == 1 ? int8_tile<1, 4, kForm, kChunks, kZero, kMin, kHalf, true, false>(a, 0, p, nullptr)
                  : int8_tile<2, 4, kForm, kChunks, kZero, kMin, kHalf, true, false>(a, 0, p, nullptr);
      add_large_values<4, kForm, kChunks, kHalf>(a, p, (float*)scratch);
    }
  const auto panels = [&](auto count) {
    a.rows >= kWideRows ? multiply_wide<count.value, kForm, kChunks, kZero, kMin, kHalf>(a, p, scratch)
                        : multiply_thin<count.value, kForm, kChunks, kZero, kMin, kHalf>(a, p);
    add_large_values<count.value, kForm, kChunks, kHalf>(a, p, (float*)scratch);
  };
  for (; p + kWidePanels <= panel_end; p += kWidePanels) panels(std::integral_constant<int, kWidePanels>{});
  for (; p < panel_end; ++p) panels(std::integral_constant<int, 1>{});
}
