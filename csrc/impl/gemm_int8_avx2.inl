// 8-bit products by vpmaddubsw: unsigned times signed bytes, neighbours added, into 16 bits. Half a panel (8 columns)
// at a time.
//
// Nibbles are at most 15, so 8 such sums stay below 2^15 (8 * 2 * 15 * 127 = 30,480), and a whole group is added up
// in 16 bits. Bytes go in as magnitudes with their sign moved to x (2 * 128 * 127 = 32,512), and are widened at once.

static inline __m256i broadcast_bytes(const int8_t* x) {
  int32_t bits;
  memcpy(&bits, x, 4);
  return _mm256_set1_epi32(bits);
}

// Adds the products of eight k, of one half of a panel and kRows rows whose bytes lie at x, to `part`: 16-bit sums of
// neighbours for nibbles, 32-bit sums for bytes.
template <int kRows, Form kForm>
static inline void multiply_chunk(const uint8_t* data, const int8_t* x, int64_t ld, __m256i (&part)[kRows]) {
  if constexpr (kForm == Form::kQ4) {
    const __m256i words = _mm256_loadu_si256((const __m256i*)data), mask = _mm256_set1_epi8(15);
    const __m256i q0 = _mm256_and_si256(words, mask), q1 = _mm256_and_si256(_mm256_srli_epi16(words, 4), mask);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      part[m] = _mm256_add_epi16(part[m], _mm256_maddubs_epi16(q0, broadcast_bytes(x + m * ld)));
      part[m] = _mm256_add_epi16(part[m], _mm256_maddubs_epi16(q1, broadcast_bytes(x + m * ld + 4)));
    }
  } else {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i q = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(data + h * 64)), _mm256_set1_epi8(-128));
      const __m256i magnitude = _mm256_abs_epi8(q);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const __m256i signed_x = _mm256_sign_epi8(broadcast_bytes(x + m * ld + h * 4), q);
        part[m] = _mm256_add_epi32(part[m], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signed_x), ones));
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
  return n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, first_lanes(n));
}
static inline void store_some(__m256 x, float* p, int n) {
  n >= 8 ? _mm256_storeu_ps(p, x) : _mm256_maskstore_ps(p, first_lanes(n), x);
}

// sums[m] += one group of weights, times the rows' bytes at x and their steps.
template <int kRows, Form kForm, int kChunks>
static inline void add_group(const PackedMatrix& w, int panel, int half, int g, const int8_t* x, int64_t ld,
                             const RowSums& s, int64_t ld_sums, size_t ahead, __m256 scale, __m256* sums) {
  constexpr int kChunkBytes = kForm == Form::kQ4 ? 64 : 128;
  const uint8_t* data = w.panel(panel) + (size_t)g * kChunks * kChunkBytes + half * 32;
  __m256i part[kRows];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) part[m] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int c = 0; c < kChunks; ++c, data += kChunkBytes) {
    if (ahead != 0) {
      _mm_prefetch((const char*)data + ahead, _MM_HINT_T1);
      if (kForm != Form::kQ4) _mm_prefetch((const char*)data + ahead + 64, _MM_HINT_T1);
    }
    multiply_chunk<kRows, kForm>(data, x + g * kChunks * 8 + c * 8, ld, part);
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    const int64_t quant = m * ld_sums + g * kChunks * 8 / kQuant;
    const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(s.steps[quant]));
    sums[m] = _mm256_fmadd_ps(group_sum<kForm>(part[m]), both, sums[m]);
  }
}

// Adds the products of the rows' large values with a panel to what is in y.
template <Form kForm, int kChunks>
static void add_large_values(const LinearArgs& a, int panel) {
  const PackedMatrix& w = *a.w;
  // The offset of nibbles is taken with the sums of groups, which hold large values, too.
  const __m256i zero = _mm256_set1_epi32(kForm == Form::kQ4 ? 0 : w.zero),
                mask = _mm256_set1_epi32(kForm == Form::kQ4 ? 15 : 255);
  for (const LargeValue *v = a.large + a.large_starts[0], *end = a.large + a.large_starts[a.rows]; v != end; ++v) {
    const Place at = place_of<kForm>((uint32_t)v->k);
    for (int half = 0; half < 2; ++half) {
      const int left = w.n - panel * 16 - half * 8;
      float* const y = a.y + (v->row - a.first_row) * a.ldy + (panel - a.first_panel) * 16 + half * 8;
      const __m256i words = _mm256_loadu_si256((const __m256i*)(w.panel(panel) + at.offset + half * 32));
      const __m256i q = _mm256_and_si256(_mm256_srl_epi32(words, _mm_cvtsi32_si128(at.shift)), mask);
      const __m256 scale = load_half_scale(w.panel_scales(panel), (size_t)v->k / (kChunks * 8), half, w.half_scales);
      const __m256 weight = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(q, zero)), scale);
      store_some(_mm256_fmadd_ps(_mm256_set1_ps(v->value), weight, load_some(y, left)), y, left);
    }
  }
}

template <int kRows, Form kForm, int kChunks>
static inline void int8_tile(const LinearArgs& a, int row, int panel, int half) {
  const PackedMatrix& w = *a.w;
  const int64_t ld = a.ld_prepared * 2;
  const int8_t* x = row_bytes(a.prepared, w.k) + row * ld;
  const RowSums s = row_sums(a.sums + row * a.ld_sums, w.k);
  const float* total = w.group == kQuant ? s.total32 : s.total16;
  // Both halves lie in the same lines: only the first asks for the next ones, and only where a thin batch waits for
  // them.
  const size_t ahead = a.rows <= 8 && half == 0 ? prefetch_distance(w, 1) : 0;
  const __m256 zero = _mm256_set1_ps(kForm == Form::kQ4 ? -(float)w.zero : 0.0f);  // bytes are signed again
  __m256 sums[kRows];
  for (int m = 0; m < kRows; ++m) sums[m] = _mm256_setzero_ps();
  for (int g = 0; g < w.groups; ++g) {
    const __m256 scale = load_half_scale(w.panel_scales(panel), (size_t)g, half, w.half_scales);
    __m256 offset = _mm256_mul_ps(zero, scale);
    if (w.has_min) offset = load_half_scale(w.panel_mins(panel), (size_t)g, half, w.half_scales);
    add_group<kRows, kForm, kChunks>(w, panel, half, g, x, ld, s, a.ld_sums, ahead, scale, sums);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
      sums[m] = _mm256_fmadd_ps(_mm256_set1_ps(total[m * a.ld_sums + g]), offset, sums[m]);
  }
  const int column = panel * 16 + half * 8, left = w.n - column < 8 ? w.n - column : 8;
  for (int m = 0; m < kRows; ++m) {
    const __m256 y = _mm256_mul_ps(sums[m], _mm256_set1_ps(s.unit[m * a.ld_sums]));
    float* out = a.y + (size_t)(row + m) * a.ldy + (panel - a.first_panel) * 16 + half * 8;
    store_some(a.bias ? _mm256_add_ps(y, load_some(a.bias + column, left)) : y, out, left);
  }
}

template <Form kForm, int kChunks>
static void linear_in_groups(const LinearArgs& a, int panel_begin, int panel_end) {
  for (int p = panel_begin; p < panel_end; ++p) {
    in_row_tiles<kTileRows8>(a.rows, [&](int row, auto rows) {
      for (int half = 0; half < 2; ++half) int8_tile<rows.value, kForm, kChunks>(a, row, p, half);
    });
    add_large_values<kForm, kChunks>(a, p);
  }
}

template <Form kForm>
static void linear_int8(const LinearArgs& a, int panel_begin, int panel_end, void*) {
  a.w->group == kQuant ? linear_in_groups<kForm, 4>(a, panel_begin, panel_end)
                       : linear_in_groups<kForm, 2>(a, panel_begin, panel_end);
}
