// Matrix products in 8 bits for 4- and 8-bit weight formats, of rows as prepare_int8.inl leaves them: what tiles ask of
// memory, the large values, and which kernels a matrix takes. What multiplies is in gemm_int8_vnni.inl and
// gemm_int8_avx2.inl.

// Most rows of a tile that unpacks. VNNI: 5 x 2 sums and as many parts leave 12 of 32 registers for operands.
// AVX2: 4 sums and 4 parts of half a panel leave 8 of 16.
#if defined(OCTAVO_ISA_AVX512)
static constexpr int kTileRows8 = 5;
#else
static constexpr int kTileRows8 = 4;
#endif

// What a tile asks of memory while it goes through a panel: the panel that many further on, where the thread will be
// next, or what comes soon in this one if so much would fill the second cache. Into that cache, whose queue of misses
// is longer than that of the first: one core and weights from memory (Zen 4), 30 us instead of 43 without and 45 into
// the first cache. Scales and minimums, too, which are too short for the hardware to foresee: one core of a Zen 3 reads
// 27 GB/s of a matrix for every 20 without.
class PanelAhead {
 public:
  PanelAhead(const PackedMatrix& w, int panel, int panels) : lines_((int)(w.panel_bytes / 64 / w.groups) + 1) {
    constexpr size_t kMost = 64 << 10, kWithin = 8 << 10;
    const size_t distance = (size_t)panels * w.panel_bytes;
    next_ = (const char*)w.panel(panel) + (distance <= kMost ? distance : kWithin);
  }
  // A group's share.
  inline void ask() {
    for (int i = 0; i < lines_; ++i, next_ += 64) _mm_prefetch(next_, _MM_HINT_T1);
  }

 private:
  const char* next_;
  int lines_;
};

// Where the integers of row k of a panel lie: in the 32-bit lanes (one a column) at `offset`, from bit `shift` on.
struct Place {
  size_t offset;
  int shift;
};
template <Form kForm>
static inline Place place_of(uint32_t k) {
  if constexpr (kForm == Form::kQ4) return {(size_t)(k / 8) * 64, (int)(k % 2 * 16 + k % 8 / 2 * 4)};
  constexpr int kPlaces[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  const int place = kPlaces[k % 8];
  return {(size_t)(k / 8) * 128 + (size_t)(place / 4) * 64, place % 4 * 8};
}

// 16 of these integers as floats.
static inline V16 integers_at(const uint8_t* data, Place at, int mask, int zero) {
  const __m128i shift = _mm_cvtsi32_si128(at.shift);
#if defined(OCTAVO_ISA_AVX512)
  const __m512i words = _mm512_srl_epi32(_mm512_loadu_si512(data + at.offset), shift);
  const __m512i q = _mm512_and_si512(words, _mm512_set1_epi32(mask));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(q, _mm512_set1_epi32(zero)))};
#else
  const auto half = [&](size_t offset) {
    const __m256i words = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i*)(data + at.offset + offset)), shift);
    const __m256i q = _mm256_and_si256(words, _mm256_set1_epi32(mask));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(q, _mm256_set1_epi32(zero)));
  };
  return {half(0), half(32)};
#endif
}

// Adds the products of the rows' large values with kPanels panels to what is in y. `weights` has room for those of k
// values a panel.
template <int kPanels, Form kForm, int kChunks, bool kHalfScales>
static void add_large_values(const LinearArgs& a, int panel, float* weights) {
  const PackedMatrix& w = *a.w;
  if (a.large.num_values == 0) return;
  const uint8_t *data[kPanels], *scales[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    data[p] = w.panel(panel + p);
    scales[p] = w.panel_scales(panel + p);
  }
  for (int c = 0; c < a.large.num_channels; ++c) {
    const uint32_t k = (uint32_t)a.large.channels[c];
    const Place at = place_of<kForm>(k);
    for (int p = 0; p < kPanels; ++p) {
      const V16 q = integers_at(data[p], at, kForm == Form::kQ4 ? 15 : 255, w.zero);
      (q * load_scale(scales[p], k / (kChunks * 8), kHalfScales)).store(weights + (c * kPanels + p) * 16);
    }
  }
  float* const y = a.y + (panel - a.first_panel) * 16;
  const int64_t ldy = a.ldy;
  // A row's values follow one another.
  const auto add = [&](auto whole) {
    for (const LargeValue *v = a.large.values, *end = v + a.large.num_values; v != end;) {
      const int32_t row = v->row;
      float* const out = y + row * ldy;
      V16 sum[kPanels];
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p)
        sum[p] =
            whole.value ? V16::load(out + p * 16) : V16::load_partial(out + p * 16, lanes_left(w.n, (panel + p) * 16));
      do {
        const V16 value = V16::set1(v->value);
        const float* const channel = weights + v->channel * kPanels * 16;
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) sum[p] = fma(value, V16::load(channel + p * 16), sum[p]);
      } while (++v != end && v->row == row);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p)
        whole.value ? sum[p].store(out + p * 16)
                    : sum[p].store_partial(out + p * 16, lanes_left(w.n, (panel + p) * 16));
    }
  };
  (panel + kPanels) * 16 <= w.n ? add(std::true_type{}) : add(std::false_type{});
}

#if defined(OCTAVO_ISA_VNNI)
#include "gemm_int8_vnni.inl"
#else
#include "gemm_int8_avx2.inl"
#endif

template <Form kForm>
static void linear_int8(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  uint8_t* const aligned = (uint8_t*)(((uintptr_t)scratch + 63) / 64 * 64);
  const PackedMatrix& w = *a.w;
  const auto run = [&](auto chunks, auto min, auto half) {
    linear_in_groups<kForm, chunks.value, min.value, half.value>(a, panel_begin, panel_end, aligned);
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

static Preparation preparation(const PackedMatrix& w) {
  switch (w.form) {
    case Form::kQ4:
    case Form::kQ8x4:
      return w.finite_scales ? kAsInt8 : kAsFloat;
#if defined(OCTAVO_ISA_BF16)
    case Form::kBF16:
      return kAsBf16;
#endif
    default:
      return kAsFloat;
  }
}

static void prepare_row(const float* x, int k, int preparation, uint16_t* prepared, float* sums) {
#if defined(OCTAVO_ISA_BF16)
  if (preparation & kAsBf16) prepare_row_bf16(x, k, prepared, sums);
#endif
  if (preparation & kAsInt8) RowPreparation(x, k, const_cast<Quant*>(row_quants(prepared, k)), sums).run();
}

static void linear(const LinearArgs& a, int panel_begin, int panel_end, void* scratch) {
  switch (preparation(*a.w)) {
    case kAsInt8:
      return a.w->form == Form::kQ4 ? linear_int8<Form::kQ4>(a, panel_begin, panel_end, scratch)
                                    : linear_int8<Form::kQ8x4>(a, panel_begin, panel_end, scratch);
#if defined(OCTAVO_ISA_BF16)
    case kAsBf16:
      return linear_bf16(a, panel_begin, panel_end, scratch);
#endif
    default:
      return linear_f32(a, panel_begin, panel_end, scratch);
  }
}

// One float panel; or the weights of large values for four panels, and the alignment. That is more than a wide batch
// needs: twice 16 bytes a value for the nibbles, and at most 2 x 5 vectors a group of 16.
static size_t linear_scratch_bytes(int k) { return (size_t)padded32(k) * 4 * 64 + 64; }
