// Matrix product on AMX tiles (tdpbf16ps), where the machine has them.
//
// Activations are rounded to bf16 once per row (prepare_row), weights once as a panel is unpacked; all sums are
// float32 inside the tiles, k in steps of 32, in order. A tile op rounds each element by its own row and column
// alone, whatever the number of rows, so law 1 holds. (Keeping weights as exact integers and scaling every group's
// sum, as gemm_bf16.inl does, costs two vector operations per row and group: measured 2 to 3 times slower here,
// for a mean KL of 0.0002 instead of 0.0003 on the default model.)

static Preparation preparation(const PackedMatrix& w) {
  return w.form == Form::kF32 || w.form == Form::kF16 ? kAsFloat : kAsBf16;
}

static void prepare_row(const float* x, int k, int, uint16_t* prepared, float*) {
  for (int i = 0; i < padded32(k); i += 16) {
    const int left = k - i < 0 ? 0 : k - i < 16 ? k - i : 16;
    const __m512 v = left == 16 ? _mm512_loadu_ps(x + i) : _mm512_maskz_loadu_ps((__mmask16)((1u << left) - 1u), x + i);
    _mm256_storeu_si256((__m256i*)(prepared + i), (__m256i)_mm512_cvtneps_pbh(v));
  }
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};  // per row of each tile
  uint8_t rows[16] = {};
};

static constexpr int kBlockRows = 16;  // rows of a tile

static inline void configure_tiles(int rows) {
  TileConfig c;
  for (int t = 0; t < 8; ++t) c.bytes[t] = 64;
  for (int t = 0; t < 6; ++t) c.rows[t] = (uint8_t)rows;  // 0 to 3: sums; 4, 5: activations
  c.rows[6] = c.rows[7] = 16;                             // weights: 16 pairs of k
  _tile_loadconfig(&c);
}

// Rounds 16 + 16 floats (k even, k odd) to bf16 pairs. Halves round away from zero rather than to even: one
// addition less, and no bias, since positive and negative weights both occur.
static inline __m512i round_pair(__m512 even, __m512 odd) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32((int)0xffff0000u), high, low, 0xEA);  // (mask & high) | low
}

// Panels lie end to end, so what is read next lies ahead. Unpacking fills the core's window with arithmetic, and the
// hardware's own prefetching alone left memory waiting for it.
static constexpr int kPrefetchBytes = 4096;
static inline void prefetch_weights(const uint8_t* p) { _mm_prefetch((const char*)p + kPrefetchBytes, _MM_HINT_T0); }

// The values of a nibble; vpermps looks at four bits of its index.
static inline __m512 nibble_values(int zero) {
  alignas(64) float values[16];
  for (int i = 0; i < 16; ++i) values[i] = (float)(i - zero);
  return _mm512_load_ps(values);
}

static inline void unpack_rounded_q4(const PackedMatrix& w, int panel, int k_begin, int k_end, uint8_t* out) {
  const uint8_t* data = w.panel(panel) + (size_t)k_begin * 8;
  const uint8_t* scales = w.panel_scales(panel);
  const uint8_t* mins = w.panel_mins(panel);
  const __m512 table = nibble_values(w.zero);
  for (int k = k_begin; k < k_end; k += w.group) {
    const V16 scale = load_scale(scales, (size_t)(k / w.group), w.half_scales);
    const V16 min = mins ? load_scale(mins, (size_t)(k / w.group), w.half_scales) : V16::zero();
    for (int c = 0; c < w.group / 8; ++c, data += 64, out += 256) {
      const __m512i words = _mm512_loadu_si512(data);
      prefetch_weights(data);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(words, (unsigned)(4 * j)), table);
        const __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(words, (unsigned)(16 + 4 * j)), table);
        _mm512_store_si512(out + j * 64,
                           round_pair(_mm512_fmadd_ps(even, scale.v, min.v), _mm512_fmadd_ps(odd, scale.v, min.v)));
      }
    }
  }
}

static inline void unpack_rounded_q8(const PackedMatrix& w, int panel, int k_begin, int k_end, uint8_t* out) {
  const uint8_t* q = w.panel(panel) + (size_t)k_begin * 16;
  const uint8_t* scales = w.panel_scales(panel);
  const uint8_t* mins = w.panel_mins(panel);
  // The bytes of a pair lie side by side: lane 2c + h is column c (or 8 + c), k parity h.
  const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int k = k_begin; k < k_end; k += w.group) {
    const V16 scale = load_scale(scales, (size_t)(k / w.group), w.half_scales);
    const V16 min = mins ? load_scale(mins, (size_t)(k / w.group), w.half_scales) : V16::zero();
    const __m512 s0 = _mm512_permutexvar_ps(low, scale.v), s1 = _mm512_permutexvar_ps(high, scale.v);
    const __m512 m0 = _mm512_permutexvar_ps(low, min.v), m1 = _mm512_permutexvar_ps(high, min.v);
#pragma GCC unroll 4
    for (int i = 0; i < w.group / 2; ++i, q += 32, out += 64) {
      prefetch_weights(q);
      const __m512 q0 = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)q)));
      const __m512 q1 = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(q + 16))));
      _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(q1, s1, m1), _mm512_fmadd_ps(q0, s0, m0)));
    }
  }
}

// Unpacks k in [k_begin, k_end), whole groups, of a quantised panel to bf16 [k / 2][16][2].
static inline void unpack_rounded(const PackedMatrix& w, int panel, int k_begin, int k_end, uint8_t* out) {
  w.form == Form::kQ4 ? unpack_rounded_q4(w, panel, k_begin, k_end, out)
                      : unpack_rounded_q8(w, panel, k_begin, k_end, out);
}

// Writes a tile's worth of sums from `sums` [rows][16], with the bias and the panel's true width.
static inline void write_block(const LinearArgs& a, int row, int rows, int panel, const float* sums) {
  const int column = panel * 16, left = lanes_left(a.w->n, column);
  for (int m = 0; m < rows; ++m) {
    V16 y = V16::load(sums + m * 16);
    if (a.bias) y = y + V16::load_partial(a.bias + column, left);
    y.store_partial(a.y + (size_t)(row + m) * a.ldy + (panel - a.first_panel) * 16, left);
  }
}

#define OCTAVO_STORE_TILE(tile, row, rows, panel)                                                          \
  do {                                                                                                     \
    if (a.bias == nullptr && (panel) * 16 + 16 <= a.w->n) {                                                \
      _tile_stored(tile, a.y + (size_t)(row) * a.ldy + ((panel) - a.first_panel) * 16, (size_t)a.ldy * 4); \
    } else {                                                                                               \
      _tile_stored(tile, sums, 64);                                                                        \
      write_block(a, row, rows, panel, sums);                                                              \
    }                                                                                                      \
  } while (0)

static constexpr int kSliceK = 128;  // k unpacked at a time for a thin batch: four panels of it fit in L1

// At most 16 rows: weights stream by once. Four panels at a time, to hide the latency of a tile op behind three others.
static void amx_thin(const LinearArgs& a, int panel, int panels, uint8_t* scratch) {
  const PackedMatrix& w = *a.w;
  const int padded = padded32(w.k);
  const size_t ld = (size_t)a.ld_prepared * 2;
  const uint8_t* weights[4];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  // Groups of a slice must be whole: 128 is a multiple of every group.
  for (int begin = 0; begin < padded; begin += kSliceK) {
    const int end = begin + kSliceK < padded ? begin + kSliceK : padded;
    for (int p = 0; p < panels; ++p) {
      if (w.form == Form::kBF16) {
        weights[p] = w.panel(panel + p) + (size_t)begin * 32;
      } else {
        uint8_t* out = scratch + (size_t)p * kSliceK * 32;
        unpack_rounded(w, panel + p, begin, end, out);
        weights[p] = out;
      }
    }
    for (int k = begin; k < end; k += 32) {
      const size_t at = (size_t)(k - begin) * 32;
      _tile_loadd(4, a.prepared + k, ld);
      _tile_loadd(6, weights[0] + at, 64);
      _tile_dpbf16ps(0, 4, 6);
      if (panels > 1) {
        _tile_loadd(7, weights[1] + at, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (panels > 2) {
        _tile_loadd(6, weights[2] + at, 64);
        _tile_dpbf16ps(2, 4, 6);
      }
      if (panels > 3) {
        _tile_loadd(7, weights[3] + at, 64);
        _tile_dpbf16ps(3, 4, 7);
      }
    }
  }
  alignas(64) float sums[16 * 16];
  OCTAVO_STORE_TILE(0, 0, a.rows, panel);
  if (panels > 1) OCTAVO_STORE_TILE(1, 0, a.rows, panel + 1);
  if (panels > 2) OCTAVO_STORE_TILE(2, 0, a.rows, panel + 2);
  if (panels > 3) OCTAVO_STORE_TILE(3, 0, a.rows, panel + 3);
}

// 32 rows (two blocks) and one or two panels.
static inline void amx_wide_block(const LinearArgs& a, int row0, int row1, int panel, int panels,
                                  const uint8_t* const* weights) {
  const size_t ld = (size_t)a.ld_prepared * 2;
  const uint16_t* x0 = a.prepared + (size_t)row0 * a.ld_prepared;
  const uint16_t* x1 = a.prepared + (size_t)row1 * a.ld_prepared;
  const int padded = padded32(a.w->k);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < padded; k += 32) {
    _tile_loadd(4, x0 + k, ld);
    _tile_loadd(6, weights[0] + (size_t)k * 32, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, x1 + k, ld);
    _tile_dpbf16ps(1, 5, 6);
    if (panels > 1) {
      _tile_loadd(7, weights[1] + (size_t)k * 32, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[16 * 16];
  OCTAVO_STORE_TILE(0, row0, kBlockRows, panel);
  OCTAVO_STORE_TILE(1, row1, kBlockRows, panel);
  if (panels > 1) {
    OCTAVO_STORE_TILE(2, row0, kBlockRows, panel + 1);
    OCTAVO_STORE_TILE(3, row1, kBlockRows, panel + 1);
  }
}
#undef OCTAVO_STORE_TILE

// One or two rows of a 4-bit matrix without tiles: filling a tile costs more than using it then. The sums are those
// of the tile op, step by step (Intel's definition of TDPBF16PS): within 32 k even and odd k are summed apart from
// zero, then together, then added to the total. A test holds that both ways give the same bits.
template <int kRows>
static void amx_vector(const LinearArgs& a, int panel, const float* x) {
  const PackedMatrix& w = *a.w;
  const uint8_t* data = w.panel(panel);
  const uint8_t* scales = w.panel_scales(panel);
  const uint8_t* mins = w.panel_mins(panel);
  const __m512 table = nibble_values(w.zero);
  const __m512i half = _mm512_set1_epi32(0x8000), keep = _mm512_set1_epi32((int)0xffff0000u);
  const auto rounded = [&](__m512i index, V16 scale, V16 min) {
    const __m512 exact = _mm512_fmadd_ps(_mm512_permutexvar_ps(index, table), scale.v, min.v);
    return V16{_mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(exact), half), keep))};
  };
  V16 total[kRows];
  for (int m = 0; m < kRows; ++m) total[m] = V16::zero();
  for (int k = 0; k < w.k; k += 32) {
    const V16 scale = load_scale(scales, (size_t)(k / 32), w.half_scales);
    const V16 min = mins ? load_scale(mins, (size_t)(k / 32), w.half_scales) : V16::zero();
    V16 even[kRows], odd[kRows];
    for (int m = 0; m < kRows; ++m) even[m] = odd[m] = V16::zero();
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c, data += 64) {
      const __m512i words = _mm512_loadu_si512(data);
      prefetch_weights(data);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const V16 w0 = rounded(_mm512_srli_epi32(words, (unsigned)(4 * j)), scale, min);
        const V16 w1 = rounded(_mm512_srli_epi32(words, (unsigned)(16 + 4 * j)), scale, min);
        for (int m = 0; m < kRows; ++m) {
          const float* pair = x + (size_t)m * w.k + k + 8 * c + 2 * j;
          even[m] = fma(V16::set1(pair[0]), w0, even[m]);
          odd[m] = fma(V16::set1(pair[1]), w1, odd[m]);
        }
      }
    }
    for (int m = 0; m < kRows; ++m) total[m] = total[m] + (even[m] + odd[m]);
  }
  for (int m = 0; m < kRows; ++m) {
    alignas(64) float sums[16];
    total[m].store(sums);
    write_block(a, m, 1, panel, sums);
  }
}

// The prepared rows as floats, in scratch.
static inline const float* widen_rows(const LinearArgs& a, uint8_t* scratch) {
  float* x = (float*)scratch;
  for (int m = 0; m < a.rows; ++m)
    for (int k = 0; k < a.w->k; k += 16)
      load_bf16(a.prepared + (size_t)m * a.ld_prepared + k).store(x + (size_t)m * a.w->k + k);
  return x;
}

// More than 16 rows: two panels are unpacked once and meet all rows.
static void amx_wide(const LinearArgs& a, int panel, int panels, uint8_t* scratch) {
  const PackedMatrix& w = *a.w;
  const uint8_t* weights[2] = {};
  for (int p = 0; p < panels; ++p) {
    weights[p] = w.panel(panel + p);
    if (w.form == Form::kBF16) continue;
    uint8_t* out = scratch + (size_t)p * w.k * 32;
    unpack_rounded(w, panel + p, 0, w.k, out);
    weights[p] = out;
  }
  // The last blocks move back so that they are whole: rows done twice come out the same.
  const int last = a.rows - kBlockRows;
  for (int row = 0; row < a.rows; row += 2 * kBlockRows)
    amx_wide_block(a, row < last ? row : last, row + kBlockRows < last ? row + kBlockRows : last, panel, panels,
                   weights);
}

static void linear(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  if (preparation(*a.w) == kAsFloat) return linear_f32(a, panel_begin, panel_end, scratch);
  uint8_t* aligned = (uint8_t*)(((uintptr_t)scratch + 63) / 64 * 64);
  if (a.rows <= 2 && a.w->form == Form::kQ4) {
    const float* x = widen_rows(a, aligned);
    for (int p = panel_begin; p < panel_end; ++p) a.rows == 1 ? amx_vector<1>(a, p, x) : amx_vector<2>(a, p, x);
    return;
  }
  configure_tiles(a.rows < kBlockRows ? a.rows : kBlockRows);
  const int step = a.rows <= kBlockRows ? 4 : 2;
  for (int p = panel_begin; p < panel_end; p += step) {
    const int panels = p + step <= panel_end ? step : panel_end - p;
    a.rows <= kBlockRows ? amx_thin(a, p, panels, aligned) : amx_wide(a, p, panels, aligned);
  }
  _tile_release();
}

static size_t linear_scratch_bytes(int k) {
  const size_t padded = (size_t)padded32(k);
  const size_t wide = padded * 64, thin = (size_t)kSliceK * 32 * 4;
  return (wide > thin ? wide : thin) + 128;
}
