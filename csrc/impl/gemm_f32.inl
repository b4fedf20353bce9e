// Matrix product in float32: every weight is unpacked to the exact float that the format means, then
// y[m][n] = fma over k = 0, 1, 2, ... in order. The order is the same for any number of rows (law 1).

static inline V16 load_scale(const uint8_t* p, size_t index, bool half) {
  return half ? load_f16((const uint16_t*)p + index * 16) : V16::load((const float*)p + index * 16);
}

// Every format with 4-bit fields has w = scale * q + (min - zero * scale) with an exact product, so one fused
// multiply-add rounds as the format's definition does.
static inline void unpack_q4(const PackedMatrix& w, int panel, int k_begin, int k_end, float* out) {
  const uint32_t* words = (const uint32_t*)w.panel(panel) + (size_t)k_begin * 2;
  const uint8_t* mins = w.panel_mins(panel);
  for (int k = k_begin; k < k_end; k += w.group) {
    const size_t g = (size_t)(k / w.group);
    const V16 scale = load_scale(w.panel_scales(panel), g, w.half_scales);
    V16 min = V16::set1(-(float)w.zero) * scale;
    if (mins) min = load_scale(mins, g, w.half_scales);
    for (int c = 0; c < w.group / 8; ++c, words += 16, out += 128) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        fma(load_nibble(words, 4 * j), scale, min).store(out + j * 32);
        fma(load_nibble(words, 16 + 4 * j), scale, min).store(out + j * 32 + 16);
      }
    }
  }
}

static inline void unpack_q8(const PackedMatrix& w, int panel, int k_begin, int k_end, float* out) {
  const int8_t* q = (const int8_t*)w.panel(panel) + (size_t)k_begin * 16;
  const uint8_t* mins = w.panel_mins(panel);
  for (int k = k_begin; k < k_end; k += w.group) {
    const size_t g = (size_t)(k / w.group);
    const V16 scale = load_scale(w.panel_scales(panel), g, w.half_scales);
    const V16 min = mins ? load_scale(mins, g, w.half_scales) : V16::zero();
    for (int i = 0; i < w.group / 2; ++i, q += 32, out += 32)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const V16 product = load_i8_pair(q, h) * scale;
        (mins ? product + min : product).store(out + h * 16);
      }
  }
}

// Only tests of the packed form read it this way; products take the bytes as they are.
static inline void unpack_q8x4(const PackedMatrix& w, int panel, int k_begin, int k_end, float* out) {
  constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const uint8_t* mins = w.panel_mins(panel);
  for (int k = k_begin; k < k_end; k += 8, out += 128) {
    const size_t g = (size_t)(k / w.group);
    const V16 scale = load_scale(w.panel_scales(panel), g, w.half_scales);
    const V16 min = mins ? load_scale(mins, g, w.half_scales) : V16::zero();
    for (int i = 0; i < 8; ++i) {
      const uint8_t* q = w.panel(panel) + (size_t)k * 16 + (i / 4) * 64 + i % 4;
      float column[16];
      for (int c = 0; c < 16; ++c) column[c] = (float)(q[c * 4] - w.zero);
      const V16 product = V16::load(column) * scale;
      (mins ? product + min : product).store(out + kOrder[i] * 16);
    }
  }
}

// Floats of k in [k_begin, k_end) of a panel, [k][16]; whole groups where the format has groups.
static inline void unpack_range(const PackedMatrix& w, int panel, int k_begin, int k_end, float* out) {
  switch (w.form) {
    case Form::kQ4:
      return unpack_q4(w, panel, k_begin, k_end, out);
    case Form::kQ8:
      return unpack_q8(w, panel, k_begin, k_end, out);
    case Form::kQ8x4:
      return unpack_q8x4(w, panel, k_begin, k_end, out);
    case Form::kF32:
      memcpy(out, w.panel(panel) + (size_t)k_begin * 64, (size_t)(k_end - k_begin) * 64);
      return;
    case Form::kBF16:
      for (int k = k_begin; k < k_end; ++k, out += 16)
        load_bf16_pair((const uint16_t*)w.panel(panel) + (size_t)(k / 2) * 32, k % 2).store(out);
      return;
    case Form::kF16:
      for (int k = k_begin; k < k_end; ++k, out += 16) {
        const uint16_t* pair = (const uint16_t*)w.panel(panel) + (size_t)(k / 2) * 32 + k % 2;
        uint16_t column[16];
        for (int c = 0; c < 16; ++c) column[c] = pair[2 * c];
        load_f16(column).store(out);
      }
  }
}

static void unpack_panel(const PackedMatrix& w, int panel, float* out) { unpack_range(w, panel, 0, w.k, out); }

// 16 columns of `kRows` rows. AVX2 holds 6 rows (12 registers of sums), AVX-512 twice as many.
#if defined(OCTAVO_ISA_AVX512)
static constexpr int kF32Rows = 12;
#else
static constexpr int kF32Rows = 6;
#endif

static constexpr int kThinK = 32;  // k unpacked at a time for a thin batch: 2 KiB, every group divides it

// `weights` holds the whole panel, or is null: then each piece of it is unpacked as it is needed.
template <int kRows>
static inline void f32_tile(const LinearArgs& a, int row, int panel, const float* weights) {
  V16 acc[kRows];
  for (int m = 0; m < kRows; ++m) acc[m] = V16::zero();
  const float* x = a.x + (size_t)row * a.ldx;
  alignas(64) float piece[kThinK * 16];
  for (int begin = 0; begin < a.w->k; begin += kThinK) {
    const int end = begin + kThinK < a.w->k ? begin + kThinK : a.w->k;
    const float* w = weights ? weights + (size_t)begin * 16 : piece;
    if (weights == nullptr) unpack_range(*a.w, panel, begin, end, piece);
    for (int k = begin; k < end; ++k, w += 16) {
      const V16 v = V16::load(w);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) acc[m] = fma(V16::set1(x[(size_t)m * a.ldx + k]), v, acc[m]);
    }
  }
  const int column = panel * 16, left = lanes_left(a.w->n, column);
  for (int m = 0; m < kRows; ++m) {
    if (a.bias) acc[m] = acc[m] + V16::load_partial(a.bias + column, left);
    acc[m].store_partial(a.y + (size_t)(row + m) * a.ldy + (panel - a.first_panel) * 16, left);
  }
}

static void f32_rows(const LinearArgs& a, int panel, const float* weights) {
  int row = 0;
  for (; row + kF32Rows <= a.rows; row += kF32Rows) f32_tile<kF32Rows>(a, row, panel, weights);
  if (a.rows - row >= 6) {
    f32_tile<6>(a, row, panel, weights);
    row += 6;
  }
  switch (a.rows - row) {
    case 5:
      return f32_tile<5>(a, row, panel, weights);
    case 4:
      return f32_tile<4>(a, row, panel, weights);
    case 3:
      return f32_tile<3>(a, row, panel, weights);
    case 2:
      return f32_tile<2>(a, row, panel, weights);
    case 1:
      return f32_tile<1>(a, row, panel, weights);
    default:
      return;
  }
}

static void linear_f32(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  for (int p = panel_begin; p < panel_end; ++p) {
    const float* weights = (const float*)a.w->panel(p);
    if (a.w->form != Form::kF32) {
      weights = nullptr;
      if (a.rows > 6) {  // more than one tile: unpack once for all
        unpack_panel(*a.w, p, (float*)scratch);
        weights = (const float*)scratch;
      }
    }
    f32_rows(a, p, weights);
  }
}
