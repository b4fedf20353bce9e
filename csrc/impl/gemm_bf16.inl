// Matrix product with bf16 dot products (vdpbf16ps). Integers up to 256 are exact in bf16, so the weights of
// 4- and 8-bit formats take part exactly; only the activations are rounded, once per row, by prepare_row.
//
// For column n of group g:  part = sum over the group's k, two at a time, of x[k] q[k]
//                           y    = y + part * scale[g] (+ sums[g] * min[g])
// in the order of g: one arithmetic for any number of rows (law 1). Thin batches unpack weights in registers
// as they stream by; wide ones unpack a panel once into scratch and reuse it for all rows.

// Where there are 8-bit dot products, too, those formats use them (gemm_int8.inl), and only bf16 matrices come here.
#if defined(OCTAVO_ISA_VNNI)
static constexpr bool kQuantisedInBf16 = false;
#else
static constexpr bool kQuantisedInBf16 = true;
#endif

static void prepare_row_bf16(const float* x, int k, uint16_t* prepared, float* sums) {
  const int padded = padded32(k);
  for (int i = 0; i < padded; i += 16) {
    const int left = k - i < 0 ? 0 : k - i < 16 ? k - i : 16;
    const __m512 v = left == 16 ? _mm512_loadu_ps(x + i) : _mm512_maskz_loadu_ps((__mmask16)((1u << left) - 1u), x + i);
    const __m256i b = (__m256i)_mm512_cvtneps_pbh(v);
    _mm256_storeu_si256((__m256i*)(prepared + i), b);
    if constexpr (kQuantisedInBf16)
      sums[i / 16] = hsum({_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16))});
  }
  if constexpr (kQuantisedInBf16)
    for (int i = 0; i < padded / 32; ++i) sums[padded / 16 + i] = sums[2 * i] + sums[2 * i + 1];
}

// bf16 bits of nibble - zero, twice, since vpermw looks at five bits of its index.
static inline __m512i nibble_table(int zero) {
  alignas(64) uint16_t t[32];
  for (int i = 0; i < 32; ++i) t[i] = float_to_bf16((float)((i & 15) - zero));
  return _mm512_load_si512(t);
}

// Where a tile's weights come from. fetch() prepares four k pairs (8 k), pair(j) is the j-th right operand.
struct FromBf16 {  // a bf16 matrix, or a panel unpacked to scratch
  const uint8_t* p;
  inline void fetch(int) {}
  inline __m512i pair(int chunk, int j) const { return _mm512_loadu_si512(p + ((size_t)chunk * 4 + j) * 64); }
};
struct FromQ4 {
  const uint8_t* p;
  __m512i table, words;
  inline void fetch(int chunk) {
    words = _mm512_loadu_si512(p + (size_t)chunk * 64);
    _mm_prefetch((const char*)p + (size_t)chunk * 64 + 4096, _MM_HINT_T0);
  }
  inline __m512i pair(int, int j) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, (unsigned)(4 * j)), table);
  }
};
struct FromQ8 {
  const uint8_t* p;
  inline void fetch(int) {}
  inline __m512i pair(int chunk, int j) const {
    const uint8_t* q = p + ((size_t)chunk * 4 + j) * 32;
    const __m512 lo = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)q)));
    const __m512 hi = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(q + 16))));
    return (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
  }
};

template <int kRows, int kPanels>
static inline void store_tile(const LinearArgs& a, int row, int panel, V16 (&acc)[kRows][kPanels]) {
  for (int p = 0; p < kPanels; ++p) {
    const int column = (panel + p) * 16, left = lanes_left(a.w->n, column);
    for (int m = 0; m < kRows; ++m) {
      if (a.bias) acc[m][p] = acc[m][p] + V16::load_partial(a.bias + column, left);
      acc[m][p].store_partial(a.y + (size_t)(row + m) * a.ldy + (panel + p - a.first_panel) * 16, left);
    }
  }
}

static inline __m512bh broadcast_pair(const uint16_t* x) {
  int32_t bits;
  memcpy(&bits, x, 4);
  return (__m512bh)_mm512_set1_epi32(bits);
}

template <int kRows, int kPanels, class Source>
static inline void multiply_chunk(const uint16_t* x, int64_t ld, int chunk, Source (&source)[kPanels],
                                  __m512 (&sum)[kRows][kPanels]) {
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p) source[p].fetch(chunk);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    __m512bh w[kPanels];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) w[p] = (__m512bh)source[p].pair(chunk, j);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const __m512bh v = broadcast_pair(x + (size_t)m * ld + (size_t)chunk * 8 + 2 * j);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) sum[m][p] = _mm512_dpbf16_ps(sum[m][p], v, w[p]);
    }
  }
}

template <int kRows, int kPanels, class Source>
static inline void quantised_tile(const LinearArgs& a, int row, int panel, Source (&source)[kPanels]) {
  const PackedMatrix& w = *a.w;
  const uint16_t* x = a.prepared + (size_t)row * a.ld_prepared;
  const float* sums = a.sums + (size_t)row * a.ld_sums + (w.group == 32 ? a.offset32 : 0);
  const int chunks = w.group / 8;
  V16 acc[kRows][kPanels];
  for (int m = 0; m < kRows; ++m)
    for (int p = 0; p < kPanels; ++p) acc[m][p] = V16::zero();
  for (int g = 0; g < w.groups; ++g) {
    __m512 part[kRows][kPanels];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) part[m][p] = _mm512_setzero_ps();
    for (int c = 0; c < chunks; ++c) multiply_chunk<kRows, kPanels>(x, a.ld_prepared, g * chunks + c, source, part);
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      const V16 scale = load_scale(w.panel_scales(panel + p), (size_t)g, w.half_scales);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) acc[m][p] = fma({part[m][p]}, scale, acc[m][p]);
      if (!w.has_min) continue;
      const V16 min = load_scale(w.panel_mins(panel + p), (size_t)g, w.half_scales);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        acc[m][p] = fma(V16::set1(sums[(size_t)m * a.ld_sums + g]), min, acc[m][p]);
      }
    }
  }
  store_tile<kRows, kPanels>(a, row, panel, acc);
}

template <int kRows, int kPanels>
static inline void bf16_tile(const LinearArgs& a, int row, int panel, FromBf16 (&source)[kPanels]) {
  const uint16_t* x = a.prepared + (size_t)row * a.ld_prepared;
  const int chunks = (a.w->k + 31) / 32 * 4;
  __m512 sum[kRows][kPanels];
  for (int m = 0; m < kRows; ++m)
    for (int p = 0; p < kPanels; ++p) sum[m][p] = _mm512_setzero_ps();
  for (int c = 0; c < chunks; ++c) multiply_chunk<kRows, kPanels>(x, a.ld_prepared, c, source, sum);
  V16 acc[kRows][kPanels];
  for (int m = 0; m < kRows; ++m)
    for (int p = 0; p < kPanels; ++p) acc[m][p] = {sum[m][p]};
  store_tile<kRows, kPanels>(a, row, panel, acc);
}

// Most rows and panels of a tile: 6 x 2 sums and as many parts leave 8 of 32 registers for operands. One or
// two rows take 4 panels, so that enough independent sums hide the latency of the dot product.
static constexpr int kTileRows = 6;

template <int kRows, int kPanels, class Source>
static void run_tile(const LinearArgs& a, int row, int panel, Source (&source)[kPanels]) {
  Source local[kPanels];
  for (int p = 0; p < kPanels; ++p) local[p] = source[p];
  if constexpr (std::is_same_v<Source, FromBf16>) {
    if (!kQuantisedInBf16 || a.w->form == Form::kBF16) return bf16_tile<kRows, kPanels>(a, row, panel, local);
  }
  if constexpr (kQuantisedInBf16) quantised_tile<kRows, kPanels>(a, row, panel, local);
}

template <int kPanels, class Source>
static void run_rows(const LinearArgs& a, int panel, Source (&source)[kPanels]) {
  int row = 0;
  if constexpr (kPanels <= 2)
    for (; row + kTileRows <= a.rows; row += kTileRows) run_tile<6, kPanels>(a, row, panel, source);
  switch (a.rows - row) {
    case 5:
      if constexpr (kPanels <= 2) run_tile<5, kPanels>(a, row, panel, source);
      break;
    case 4:
      if constexpr (kPanels <= 2) run_tile<4, kPanels>(a, row, panel, source);
      break;
    case 3:
      if constexpr (kPanels <= 2) run_tile<3, kPanels>(a, row, panel, source);
      break;
    case 2:
      run_tile<2, kPanels>(a, row, panel, source);
      break;
    case 1:
      run_tile<1, kPanels>(a, row, panel, source);
      break;
    default:
      break;
  }
}

template <int kPanels>
static void run_quantised_panels(const LinearArgs& a, int panel, uint8_t* scratch) {
  const PackedMatrix& w = *a.w;
  FromQ4 q4[kPanels];
  FromQ8 q8[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    q4[p].p = q8[p].p = w.panel(panel + p);
    q4[p].table = nibble_table(w.zero);
  }
  if (a.rows <= kTileRows) {
    w.form == Form::kQ4 ? run_rows<kPanels>(a, panel, q4) : run_rows<kPanels>(a, panel, q8);
    return;
  }
  FromBf16 unpacked[kPanels];
  const int chunks = w.k / 8;
  for (int p = 0; p < kPanels; ++p) {
    uint8_t* out = scratch + (size_t)p * w.k * 32;
    unpacked[p].p = out;
    for (int c = 0; c < chunks; ++c) {
      q4[p].fetch(w.form == Form::kQ4 ? c : 0);
      for (int j = 0; j < 4; ++j)
        _mm512_storeu_si512(out + ((size_t)c * 4 + j) * 64, w.form == Form::kQ4 ? q4[p].pair(c, j) : q8[p].pair(c, j));
    }
  }
  run_rows<kPanels>(a, panel, unpacked);
}

template <int kPanels>
static void run_panels(const LinearArgs& a, int panel, uint8_t* scratch) {
  if constexpr (kQuantisedInBf16)
    if (a.w->form != Form::kBF16) return run_quantised_panels<kPanels>(a, panel, scratch);
  FromBf16 source[kPanels];
  for (int p = 0; p < kPanels; ++p) source[p].p = a.w->panel(panel + p);
  run_rows<kPanels>(a, panel, source);
}

static void linear_bf16(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  int p = panel_begin;
  if (a.rows <= 2)
    for (; p + 4 <= panel_end; p += 4) run_panels<4>(a, p, (uint8_t*)scratch);
  for (; p + 2 <= panel_end; p += 2) run_panels<2>(a, p, (uint8_t*)scratch);
  for (; p < panel_end; ++p) run_panels<1>(a, p, (uint8_t*)scratch);
}

#if !defined(OCTAVO_ISA_VNNI)
static Preparation preparation(const PackedMatrix& w) {
  return w.form == Form::kF32 || w.form == Form::kF16 ? kAsFloat : kAsBf16;
}
static void prepare_row(const float* x, int k, int, uint16_t* prepared, float* sums) {
  prepare_row_bf16(x, k, prepared, sums);
}
static void linear(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  preparation(*a.w) == kAsBf16 ? linear_bf16(a, panel_begin, panel_end, scratch)
                               : linear_f32(a, panel_begin, panel_end, scratch);
}
static size_t linear_scratch_bytes(int k) {
  return (size_t)padded32(k) * 64 + 128;  // one float panel, or two bf16 panels, aligned
}
#endif
