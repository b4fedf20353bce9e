// Matrix products in 8 bits for 4- and 8-bit weight formats: how a row is prepared for them. What multiplies is in
// gemm_int8_vnni.inl and gemm_int8_avx2.inl.
//
// prepare_row turns each 32 values of a row into signed bytes and a step, the smallest whose 127-fold reaches all of
// them. A few channels of a transformer carry values many times larger than the rest; each would cost its group most of
// the resolution, and together they would make most of the error of the whole product. They stay floats, in a list of
// their own. A group of weights is then exact integer arithmetic, and costs per row and column
//
//   y += (sum over k of q[k] x[k]) * (weight scale * step) + sum x * min
//
// and each large value another y += x * weight, after all groups: which these are, the row alone decides, so there is
// one arithmetic for any number of rows (law 1). Steps have two bits of mantissa. So a wide batch multiplies every
// scale by the four mantissas once, and by the power of two with an integer addition to its exponent, which runs on
// ports that the products leave idle. So does unpacking a nibble, an `and`: weights stay packed, and the panels at work
// stay near while all rows meet them.

static constexpr int kQuant = 32;  // values of a row that share a step
// A value is large if its magnitude exceeds this many times the row's root mean square.
// On the default model 2 values of 576 and 7 of 1,536 are; mean coarse KL 0.0010 (with a limit of 6: 0.0012).
static constexpr float kLargeValue = 5.2f;
static_assert(kLargeValue > 5.0f, "large_per_row() counts on it");
static constexpr int kFractionBits = 2, kFractions = 1 << kFractionBits;  // of a step's mantissa
// Steps are taken relative to the row's unit, from 1 to 2^kMostShift, so that products with scales stay normal floats.
// No scale is zero (see pack_panel) or infinite, which adding to an exponent would make a number of.
static constexpr int kMostShift = 24;

static inline int64_t padded_quants(int k) { return ((int64_t)k + 8 * kQuant - 1) / (8 * kQuant) * 8; }

struct RowLarge {
  int32_t k;
  float value;
};

// What a prepared row leaves in `sums`, next to its bytes; sums over groups are of what the bytes stand for and of the
// large values. Every array has room for whole vectors.
struct RowSums {
  int32_t* exponents;  // [groups of 32] of the step in units, where a float keeps it
  int32_t* fractions;  // [groups of 32] of the step: its mantissa is 1 + fraction / 256
  float* total32;      // [groups of 32] sums in units
  float* total16;      // [groups of 16] the same
  int32_t* zeros32;    // [groups of 32] -8 times the sum of bytes
  int32_t* zeros16;    // [groups of 16] the same
  float* steps;        // [groups of 32] in units
  float* unit;         // a power of two
  int32_t* num_large;
  RowLarge* large;
};
static inline RowSums row_sums(float* sums, int k) {
  const int64_t quants = padded_quants(k);
  float* const rest = sums + 9 * quants;
  return {(int32_t*)sums,
          (int32_t*)(sums + quants),
          sums + 2 * quants,
          sums + 3 * quants,
          (int32_t*)(sums + 5 * quants),
          (int32_t*)(sums + 6 * quants),
          sums + 8 * quants,
          rest,
          (int32_t*)(rest + 1),
          (RowLarge*)(rest + 2)};
}
static inline const RowSums row_sums(const float* sums, int k) { return row_sums(const_cast<float*>(sums), k); }

// A prepared row: bf16 values where there are products of them, then the bytes, [K32].
static inline const int8_t* row_bytes(const uint16_t* prepared, int k) {
#if defined(OCTAVO_ISA_BF16)
  return (const int8_t*)(prepared + padded32(k));
#else
  return (void)k, (const int8_t*)prepared;
#endif
}

static inline V16 load_masked(const float* x, int left) {
  return left >= 16 ? V16::load(x) : left <= 0 ? V16::zero() : V16::load_partial(x, left);
}

// 16 values as the nearest bytes. They lie as the nibbles of a packed word do: of each 8 k first 0, 4, 1, 5, then 2, 6,
// 3, 7.
static inline __m128i bytes_in_order(V16 q) {
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
#if defined(OCTAVO_ISA_AVX512)
  const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(q.v));
#else
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(q.a), _mm256_cvtps_epi32(q.b));  // 0-3 8-11 4-7 12-15
  const __m256i sorted = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(sorted), _mm256_extracti128_si256(sorted, 1));
#endif
  return _mm_shuffle_epi8(bytes, order);
}

static inline V16 magnitude(V16 x) { return max(x, V16::zero() - x); }

// Bit i: lane i of x exceeds `limit`.
static inline uint32_t lanes_above(V16 x, float limit) {
#if defined(OCTAVO_ISA_AVX512)
  return _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GT_OQ);
#else
  const __m256 most = _mm256_set1_ps(limit);
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, most, _CMP_GT_OQ)) |
         (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, most, _CMP_GT_OQ)) << 8;
#endif
}

static inline float float_of(int32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// The smallest steps, as bits, whose 127-fold is not below x; x >= 0 and finite.
static inline __m256i steps_of(__m256 x) {
  const __m256i rest = _mm256_set1_epi32((1 << (23 - kFractionBits)) - 1);
  const __m256i bits = _mm256_castps_si256(_mm256_div_ps(x, _mm256_set1_ps(127.0f)));
  return _mm256_andnot_si256(rest, _mm256_add_epi32(bits, rest));
}
static inline int32_t step_of(float x) { return _mm256_cvtsi256_si32(steps_of(_mm256_set1_ps(x))); }

// Lane i: the largest lane of m[i].
static inline __m256 largest_of_each(const __m256 (&m)[8]) {
  __m256 pairs[4], quads[2];
  for (int i = 0; i < 4; ++i) {
    const __m256 a = m[2 * i], b = m[2 * i + 1];
    pairs[i] = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 2; ++i) {
    const __m256d a = _mm256_castps_pd(pairs[2 * i]), b = _mm256_castps_pd(pairs[2 * i + 1]);
    quads[i] = _mm256_max_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return _mm256_max_ps(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
                       _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
}

// Prepares a row of int8_t bytes[K32] and `sums`.
class RowPreparation {
 public:
  RowPreparation(const float* x, int k, int8_t* bytes, float* sums)
      : x_(x), k_(k), quants_(padded32(k) / kQuant), bytes_(bytes), s_(row_sums(sums, k)) {}

  void run() {
    float mean, high;
    measure(mean, high);
    memset(s_.total32, 0, (size_t)padded_quants(k_) * 12);  // total16, too
    const bool finite = mean == mean && high < HUGE_VALF;
    if (!finite) {  // nothing but such a value: no product with it is a number
      memset(s_.exponents, 0, (size_t)padded_quants(k_) * 4);
      k_ = 0;
      mean = high = 0.0f;
    }
    constexpr float kSquarable = 1e-15f;  // below, squares vanish, and with them the mean
    limit_ = high < kSquarable ? high : kLargeValue * mean;
    base_ = std::max((step_of(std::min(limit_, high)) & kExponent) - (kMostShift << 23), 1 << 23);
    for (int g = 0; g < quants_; g += 8) prepare_groups(g);
    if (!finite) add_large(0, NAN);
    *s_.unit = float_of(base_);
    *s_.num_large = num_large_;
  }

 private:
  static constexpr int32_t kOne = 127 << 23, kExponent = 255 << 23;

  V16 load(int at) const { return load_masked(x_ + at, k_ - at); }

  // Root mean square and largest magnitude of the row; leaves those of groups where their exponents will be.
  void measure(float& mean, float& high) {
    V16 sum = V16::zero();
    __m256 most = _mm256_setzero_ps();
    for (int g = 0; g < quants_; g += 8) {
      __m256 m[8];
      for (int i = 0; i < 8; ++i) {
        const int at = (g + i) * kQuant;
        const V16 a = load(at), b = load(at + 16);
        sum = fma(b, b, fma(a, a, sum));
        const V16 both = max(magnitude(a), magnitude(b));
        m[i] = _mm256_max_ps(lower_half(both), upper_half(both));
      }
      const __m256 largest = largest_of_each(m);
      _mm256_storeu_ps((float*)s_.exponents + g, largest);
      most = _mm256_max_ps(most, largest);
    }
    float lanes[8];
    _mm256_storeu_ps(lanes, most);
    high = 0.0f;
    for (float lane : lanes) high = std::max(high, lane);
    mean = std::sqrt(hsum(sum) / (float)k_);
  }

  void add_large(int k, float value) {
    s_.large[num_large_++] = {k, value};
    const float in_units = value * float_of(2 * kOne - base_);
    s_.total32[k / 32] += in_units;
    s_.total16[k / 16] += in_units;
  }

  // Takes the large values of a group into the list; returns the largest magnitude of the others.
  float set_large_apart(int g) {
    float most = 0.0f;
    for (int at = g * kQuant; at < (g + 1) * kQuant; at += 16) {
      const V16 v = load(at);
      for (uint32_t lanes = lanes_above(magnitude(v), limit_); lanes != 0; lanes &= lanes - 1) {
        const int k = at + __builtin_ctz(lanes);
        add_large(k, x_[k]);
      }
      most = std::max(most, hmax(magnitude(without_large(v))));
    }
    return most;
  }

  V16 without_large(V16 v) const { return select_lt(V16::set1(limit_), magnitude(v), V16::zero(), v); }

  void prepare_groups(int g) {
    float most[8], inverse[8];
    memcpy(most, s_.exponents + g, sizeof most);
    const __m256 above = _mm256_cmp_ps(_mm256_loadu_ps(most), _mm256_set1_ps(limit_), _CMP_GT_OQ);
    for (unsigned groups = (unsigned)_mm256_movemask_ps(above); groups != 0; groups &= groups - 1) {
      const int i = __builtin_ctz(groups);
      most[i] = set_large_apart(g + i);
    }
    const __m256i base = _mm256_set1_epi32(base_);
    const __m256i step = _mm256_max_epi32(steps_of(_mm256_loadu_ps(most)), base);
    _mm256_storeu_ps(inverse, _mm256_div_ps(_mm256_set1_ps(1.0f), _mm256_castsi256_ps(step)));
    const __m256i exponent = _mm256_and_si256(step, _mm256_set1_epi32(kExponent));
    _mm256_storeu_si256((__m256i*)(s_.exponents + g), _mm256_sub_epi32(exponent, base));
    const __m256i fraction = _mm256_and_si256(_mm256_srli_epi32(step, 23 - 8), _mm256_set1_epi32(255));
    _mm256_storeu_si256((__m256i*)(s_.fractions + g), fraction);
    const __m256i in_units = _mm256_add_epi32(_mm256_sub_epi32(step, base), _mm256_set1_epi32(kOne));
    _mm256_storeu_ps(s_.steps + g, _mm256_castsi256_ps(in_units));
    for (int half = 0; half < 8 && g + half < quants_; half += 4) {
      __m256i sums[4];
      for (int i = 0; i < 4; ++i) sums[i] = prepare_group(g + half + i, inverse[half + i]);
      sums[0] = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
      store_sums(g + half, _mm256_castsi256_si128(sums[0]), _mm256_extracti128_si256(sums[0], 1),
                 _mm_loadu_ps(s_.steps + g + half));
    }
  }

  // Writes the bytes of a group; returns the sums of every four.
  __m256i prepare_group(int g, float inverse) {
    if (g >= quants_) return _mm256_setzero_si256();
    const int at = g * kQuant;
    const V16 factor = V16::set1(inverse);
    const __m128i first = bytes_in_order(without_large(load(at)) * factor);
    const __m128i second = bytes_in_order(without_large(load(at + 16)) * factor);
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
    _mm256_storeu_si256((__m256i*)(bytes_ + at), both);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), both), _mm256_set1_epi16(1));
  }

  // Of four groups from g on: sums of the first and of the last 16 bytes, and the steps in units.
  void store_sums(int g, __m128i first, __m128i last, __m128 step) {
    const __m128i all = _mm_add_epi32(first, last);
    const __m128i halves[2] = {_mm_unpacklo_epi32(first, last), _mm_unpackhi_epi32(first, last)};
    const __m128 steps[2] = {_mm_unpacklo_ps(step, step), _mm_unpackhi_ps(step, step)};
    const auto add = [](float* total, __m128i sum, __m128 scale) {
      _mm_storeu_ps(total, _mm_add_ps(_mm_loadu_ps(total), _mm_mul_ps(_mm_cvtepi32_ps(sum), scale)));
    };
    const auto times_8 = [](__m128i sum) { return _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(sum, 3)); };
    add(s_.total32 + g, all, step);
    _mm_storeu_si128((__m128i*)(s_.zeros32 + g), times_8(all));
    for (int i = 0; i < 2; ++i) {
      add(s_.total16 + 2 * g + 4 * i, halves[i], steps[i]);
      _mm_storeu_si128((__m128i*)(s_.zeros16 + 2 * g + 4 * i), times_8(halves[i]));
    }
  }

  const float* x_;
  int k_, quants_;
  int8_t* bytes_;
  RowSums s_;
  float limit_ = 0.0f;
  int32_t base_ = 0, num_large_ = 0;
};

static void gather_large(const float* sums, int64_t ld_sums, int k, int rows, LargeValue* out, int32_t* starts) {
  int32_t num = 0;
  for (int row = 0; row < rows; ++row) {
    const RowSums s = row_sums(sums + row * ld_sums, k);
    starts[row] = num;
    for (int i = 0; i < *s.num_large; ++i) out[num++] = {row, s.large[i].k, s.large[i].value};
  }
  starts[rows] = num;
}

// Most rows of a tile. VNNI: 5 x 2 sums and as many parts leave 12 of 32 registers for operands (6 x 2: 3 % slower).
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

#if defined(OCTAVO_ISA_VNNI)
#include "gemm_int8_vnni.inl"
#else
#include "gemm_int8_avx2.inl"
#endif

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
  if (preparation & kAsBf16) prepare_row_bf16(x, k, prepared, sums);  // its sums are for quantised weights: unused here
#endif
  if (preparation & kAsInt8) RowPreparation(x, k, (int8_t*)row_bytes(prepared, k), sums).run();
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

#if !defined(OCTAVO_ISA_BF16)
static size_t linear_scratch_bytes(int k) { return (size_t)k * 64; }  // one float panel
#endif
