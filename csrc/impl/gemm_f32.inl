// Matrix product in float32: every weight is unpacked to the exact float that the format means, then
// y[m][n] = fma over k = 0, 1, 2, ... in order. The order is the same for any number of rows (law 1).

static inline V16 load_scale(const uint8_t* p, size_t index, bool half) {
  return half ? load_f16((const uint16_t*)p + index * 16) : V16::load((const float*)p + index * 16);
}

static void unpack_quantised(const PackedMatrix& w, int panel, float* out) {
  const uint8_t* data = w.panel(panel);
  const uint8_t* scales = w.panel_scales(panel);
  const uint8_t* mins = w.panel_mins(panel);
  const V16 zero = V16::set1((float)w.zero);
  for (int k = 0; k < w.k; ++k) {
    const int g = k / w.group;
    const V16 q =
        w.form == Form::kQ8
            ? load_i8_pair((const int8_t*)data + (size_t)(k / 2) * 32, k % 2)
            : load_nibble((const uint32_t*)data + (size_t)(k / 8) * 16, 16 * (k % 2) + 4 * ((k % 8) / 2)) - zero;
    const V16 product = load_scale(scales, (size_t)g, w.half_scales) * q;
    (mins ? product + load_scale(mins, (size_t)g, w.half_scales) : product).store(out + (size_t)k * 16);
  }
}

static void unpack_panel(const PackedMatrix& w, int panel, float* out) {
  const uint8_t* data = w.panel(panel);
  switch (w.form) {
    case Form::kF32:
      memcpy(out, data, (size_t)w.k * 64);
      break;
    case Form::kBF16:
      for (int k = 0; k < w.k; ++k)
        load_bf16_pair((const uint16_t*)data + (size_t)(k / 2) * 32, k % 2).store(out + (size_t)k * 16);
      break;
    case Form::kF16:
      for (int k = 0; k < w.k; ++k) {
        const uint16_t* pair = (const uint16_t*)data + (size_t)(k / 2) * 32 + k % 2;
        uint16_t column[16];
        for (int c = 0; c < 16; ++c) column[c] = pair[2 * c];
        load_f16(column).store(out + (size_t)k * 16);
      }
      break;
    default:
      unpack_quantised(w, panel, out);
  }
}

// 16 columns of `kRows` rows. AVX2 holds 6 rows (12 registers of sums), AVX-512 twice as many.
#if defined(OCTAVO_ISA_AVX512)
static constexpr int kF32Rows = 12;
#else
static constexpr int kF32Rows = 6;
#endif

template <int kRows>
static inline void f32_tile(const LinearArgs& a, int row, int panel, const float* weights) {
  V16 acc[kRows];
  for (int m = 0; m < kRows; ++m) acc[m] = V16::zero();
  const float* x = a.x + (size_t)row * a.ldx;
  for (int k = 0; k < a.w->k; ++k) {
    const V16 w = V16::load(weights + (size_t)k * 16);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) acc[m] = fma(V16::set1(x[(size_t)m * a.ldx + k]), w, acc[m]);
  }
  const int column = panel * 16, left = lanes_left(a.w->n, column);
  for (int m = 0; m < kRows; ++m) {
    if (a.bias) acc[m] = acc[m] + V16::load_partial(a.bias + column, left);
    acc[m].store_partial(a.y + (size_t)(row + m) * a.ldy + (panel - a.first_panel) * 16, left);
  }
}

template <int kRows>
static void f32_rows(const LinearArgs& a, int row, int rows, int panel, const float* weights) {
  if constexpr (kRows > 0) {
    while (rows >= kRows) {
      f32_tile<kRows>(a, row, panel, weights);
      row += kRows;
      rows -= kRows;
    }
    if (rows > 0) f32_rows<kRows / 2>(a, row, rows, panel, weights);
  }
}

static void linear_f32(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  for (int p = panel_begin; p < panel_end; ++p) {
    const float* weights = (const float*)a.w->panel(p);
    if (a.w->form != Form::kF32) {
      unpack_panel(*a.w, p, (float*)scratch);
      weights = (const float*)scratch;
    }
    f32_rows<kF32Rows>(a, 0, a.rows, p, weights);
  }
}
