// How a row is prepared for matrix products in 8 bits (gemm_int8.inl).
//
// prepare_row turns each 32 values of a row into signed bytes and a step, the smallest whose 127-fold reaches all of
// them. A few channels of a transformer carry values many times larger than the rest; each would cost its group most of
// the resolution, and together they would make most of the error of the whole product. They stay floats, in a list of
// their own. A group of weights is then exact integer arithmetic, and costs per row and column
//
//   y += (sum over k of q[k] x[k]) * (weight scale * step) + sum x * min
//
// and each large value another y += x * weight, after all groups: which these are, the row alone decides, so there is
// one arithmetic for any number of rows (law 1). Steps have two bits of mantissa: where integer additions have ports of
// their own, a wide batch multiplies every scale by the four mantissas once, and by the power of two by adding to its
// exponent.

static constexpr int kQuant = 32;  // values of a row that share a step
// A value is large if its magnitude exceeds this many times the row's root mean square.
// On the default model 2 values of 576 and 7 of 1,536 are; mean coarse KL 0.0010 (with a limit of 6: 0.0012).
static constexpr float kLargeValue = 5.2f;
static_assert(kLargeValue > 5.0f, "large_per_row() counts on it");
static constexpr int kFractionBits = 2, kFractions = 1 << kFractionBits;  // of a step's mantissa
// Steps are taken relative to the row's unit, from 1 to 2^kMostShift, so that products with scales stay normal floats.
// No scale is zero (see pack_panel) or infinite, which adding to an exponent would make a number of.
static constexpr int kMostShift = 24;

struct RowLarge {
  int32_t k;
  float value;
};

// 32 values of a prepared row and what is needed of them, in one line of the cache behind one address: a tile of rows
// that had to find each of these in an array of its own spent a third of its time on addresses (Emerald Rapids, one
// core, in cache, 64 rows: 359 GOP/s, with this 390).
struct Quant {
  int8_t bytes[kQuant];
  float step;        // in the row's units
  int32_t fraction;  // of the step, whose mantissa is 1 + fraction / 256
  float total;       // sum of what the bytes stand for and of the large values, in units
  int32_t zero;      // -8 times the sum of the bytes
  float total16[2];  // total and zero of each half
  int32_t zero16[2];
};
static_assert(sizeof(Quant) == 64);

// What else a prepared row leaves, in `sums`.
struct RowRest {
  float unit;  // a power of two
  int32_t num_large;
  RowLarge large[];
};

// The row's values in bf16, where there are products of them, come before its quants, [K32 / 32].
static inline const Quant* row_quants(const uint16_t* prepared, int k) {
#if defined(OCTAVO_ISA_BF16)
  return (const Quant*)(prepared + padded32(k));
#else
  return (void)k, (const Quant*)prepared;
#endif
}
static constexpr int64_t kValuesPerQuant = sizeof(Quant) / sizeof(uint16_t);  // of `prepared`

static inline V16 load_masked(const float* x, int left) {
  return left >= 16 ? V16::load(x) : left <= 0 ? V16::zero() : V16::load_partial(x, left);
}

// 32 values as the nearest bytes. They lie as the nibbles of a packed word do: of each 8 k first 0, 4, 1, 5, then 2, 6,
// 3, 7.
static inline __m256i bytes_in_order(V16 first, V16 second) {
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
#if defined(OCTAVO_ISA_AVX512)
  const __m512i words = _mm512_packs_epi32(_mm512_cvtps_epi32(first.v), _mm512_cvtps_epi32(second.v));
  const __m512i bytes = _mm512_packs_epi16(words, words);  // lane i: fours i and i + 4, twice
  const __m512i fours = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m256i sorted = _mm512_castsi512_si256(_mm512_permutexvar_epi32(fours, bytes));
#else
  const auto words = [](V16 x) {  // 0-3 8-11 4-7 12-15
    return _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  };
  const __m256i bytes = _mm256_packs_epi16(words(first), words(second));  // lane i: fours i, i + 2, i + 4, i + 6
  const __m256i sorted = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
  return _mm256_shuffle_epi8(sorted, _mm256_broadcastsi128_si256(order));
}

static inline V16 magnitude(V16 x) {
#if defined(OCTAVO_ISA_AVX512)
  return {_mm512_abs_ps(x.v)};
#else
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
#endif
}

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

// Lane j of m[i] becomes lane i of m[j].
static inline void transpose(__m256 (&m)[8]) {
  __m256 pairs[8], quads[8];
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = _mm256_unpacklo_ps(m[2 * i], m[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_ps(m[2 * i], m[2 * i + 1]);
  }
  const auto join = [](__m256 a, __m256 b, auto high) {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_castpd_ps(high.value ? _mm256_unpackhi_pd(x, y) : _mm256_unpacklo_pd(x, y));
  };
  for (int half = 0; half < 8; half += 4)
    for (int i = 0; i < 2; ++i) {
      quads[half + 2 * i] = join(pairs[half + i], pairs[half + i + 2], std::false_type{});
      quads[half + 2 * i + 1] = join(pairs[half + i], pairs[half + i + 2], std::true_type{});
    }
  for (int i = 0; i < 4; ++i) {
    m[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    m[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}

// Prepares a row: Quant[K32 / 32] to `out`, RowRest to `sums`.
class RowPreparation {
 public:
  RowPreparation(const float* x, int k, Quant* out, float* sums)
      : x_(x), k_(k), quants_(padded32(k) / kQuant), out_(out), rest_(*(RowRest*)sums) {}

  void run() {
    float mean, high;
    measure(mean, high);
    const bool finite = mean == mean && high < HUGE_VALF;
    if (!finite) {  // nothing but such a value: no product with it is a number
      for (int g = 0; g < quants_; g += 8) _mm256_storeu_ps(largest_at(g), _mm256_setzero_ps());
      k_ = 0;
      mean = high = 0.0f;
    }
    constexpr float kSquarable = 1e-15f;  // below, squares vanish, and with them the mean
    limit_ = high < kSquarable ? high : kLargeValue * mean;
    base_ = std::max((step_of(std::min(limit_, high)) & kExponent) - (kMostShift << 23), 1 << 23);
    rest_.num_large = 0;
    // A division after the other makes steps, so those of the next eight groups begin before the bytes of these.
    Groups groups[2];
    choose_steps(0, groups[0]);
    for (int g = 0, i = 0; g < quants_; g += 8, i ^= 1) {
      if (g + 8 < quants_) choose_steps(g + 8, groups[i ^ 1]);
      is_whole(g) ? prepare_groups<true>(g, groups[i]) : prepare_groups<false>(g, groups[i]);
    }
    if (!finite) {
      rest_.large[rest_.num_large++] = {0, NAN};
      out_[0].total = out_[0].total16[0] = NAN;
    }
    rest_.unit = float_of(base_);
  }

 private:
  static constexpr int32_t kOne = 127 << 23, kExponent = 255 << 23;

  // Whether eight groups lie within the row, so that nothing need be masked.
  bool is_whole(int g) const { return (g + 8) * kQuant <= k_; }

  template <bool kWhole>
  V16 load(int at) const {
    return kWhole ? V16::load(x_ + at) : load_masked(x_ + at, k_ - at);
  }

  // Where the largest magnitudes of eight groups wait until the bytes of the first of them take their place.
  float* largest_at(int g) const { return (float*)out_[g].bytes; }

  // The largest magnitude of each of eight groups; adds their squares to `sum`.
  template <bool kWhole>
  __m256 measure_groups(int g, V16& sum) const {
    __m256 m[8];
    for (int i = 0; i < 8; ++i) {
      const int at = (g + i) * kQuant;
      const V16 a = load<kWhole>(at), b = load<kWhole>(at + 16);
      sum = fma(b, b, fma(a, a, sum));
      const V16 both = max(magnitude(a), magnitude(b));
      m[i] = _mm256_max_ps(lower_half(both), upper_half(both));
    }
    return largest_of_each(m);
  }

  // Root mean square and largest magnitude of the row; leaves those of groups at largest_at().
  void measure(float& mean, float& high) {
    V16 sum = V16::zero();
    __m256 most = _mm256_setzero_ps();
    for (int g = 0; g < quants_; g += 8) {
      const __m256 largest = is_whole(g) ? measure_groups<true>(g, sum) : measure_groups<false>(g, sum);
      _mm256_storeu_ps(largest_at(g), largest);
      most = _mm256_max_ps(most, largest);
    }
    float lanes[8];
    _mm256_storeu_ps(lanes, most);
    high = 0.0f;
    for (float lane : lanes) high = std::max(high, lane);
    mean = std::sqrt(hsum(sum) / (float)k_);
  }

  // What is known of eight groups before their bytes.
  struct Groups {
    __m256i step;
    float inverse[8];
    unsigned with_large;            // bit i: the group has large values
    float total[8], total16[2][8];  // of large values
  };

  // Takes the large values of group g + i into the list; returns the largest magnitude of the others.
  float set_large_apart(int g, int i, Groups& groups) {
    V16 most = V16::zero();
    for (int half = 0; half < 2; ++half) {
      const int at = (g + i) * kQuant + half * 16;
      const V16 v = load<false>(at);
      for (uint32_t lanes = lanes_above(magnitude(v), limit_); lanes != 0; lanes &= lanes - 1) {
        const int k = at + __builtin_ctz(lanes);
        rest_.large[rest_.num_large++] = {k, x_[k]};
        const float in_units = x_[k] * float_of(2 * kOne - base_);
        groups.total[i] += in_units;
        groups.total16[half][i] += in_units;
      }
      most = max(most, magnitude(without_large(v)));
    }
    return hmax(most);
  }

  V16 without_large(V16 v) const { return select_lt(V16::set1(limit_), magnitude(v), V16::zero(), v); }

  void choose_steps(int g, Groups& groups) {
    __m256 most = _mm256_loadu_ps(largest_at(g));
    for (float* total : {groups.total, groups.total16[0], groups.total16[1]})
      _mm256_storeu_ps(total, _mm256_setzero_ps());
    groups.with_large = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(most, _mm256_set1_ps(limit_), _CMP_GT_OQ));
    if (groups.with_large != 0) {
      float lanes[8];
      _mm256_storeu_ps(lanes, most);
      for (unsigned left = groups.with_large; left != 0; left &= left - 1)
        lanes[__builtin_ctz(left)] = set_large_apart(g, __builtin_ctz(left), groups);
      most = _mm256_loadu_ps(lanes);
    }
    groups.step = _mm256_max_epi32(steps_of(most), _mm256_set1_epi32(base_));
    _mm256_storeu_ps(groups.inverse, _mm256_div_ps(_mm256_set1_ps(1.0f), _mm256_castsi256_ps(groups.step)));
  }

  template <bool kWhole>
  void prepare_groups(int g, const Groups& groups) {
    const __m256i base = _mm256_set1_epi32(base_), step = groups.step;
    __m256i sums[2];  // of four groups each: of their first 16 bytes, of their last 16 bytes
    for (int half = 0; half < 2; ++half) {
      __m256i s[4];
      for (int i = 0; i < 4; ++i) {
        const int group = 4 * half + i;
        s[i] = prepare_group<kWhole>(g + group, groups.inverse[group], groups.with_large >> group & 1);
      }
      sums[half] = _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
    }
    const __m256i first = _mm256_permute2x128_si256(sums[0], sums[1], 0x20);
    const __m256i last = _mm256_permute2x128_si256(sums[0], sums[1], 0x31), all = _mm256_add_epi32(first, last);
    const __m256 in_units =
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_sub_epi32(step, base), _mm256_set1_epi32(kOne)));
    const auto total = [&](const float* large, __m256i sum) {
      return _mm256_add_ps(_mm256_loadu_ps(large), _mm256_mul_ps(_mm256_cvtepi32_ps(sum), in_units));
    };
    const auto zero = [](__m256i sum) {
      return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(sum, 3)));
    };
    const __m256i fraction = _mm256_and_si256(_mm256_srli_epi32(step, 23 - 8), _mm256_set1_epi32(255));
    __m256 fields[8] = {in_units,
                        _mm256_castsi256_ps(fraction),
                        total(groups.total, all),
                        zero(all),
                        total(groups.total16[0], first),
                        total(groups.total16[1], last),
                        zero(first),
                        zero(last)};
    transpose(fields);
    for (int i = 0; i < 8 && (kWhole || g + i < quants_); ++i) _mm256_storeu_ps(&out_[g + i].step, fields[i]);
  }

  // Writes the bytes of a group; returns the sums of every four.
  template <bool kWhole>
  __m256i prepare_group(int g, float inverse, bool has_large) {
    if (!kWhole && g >= quants_) return _mm256_setzero_si256();
    const int at = g * kQuant;
    const V16 factor = V16::set1(inverse);
    V16 first = load<kWhole>(at), second = load<kWhole>(at + 16);
    if (has_large) {
      first = without_large(first);
      second = without_large(second);
    }
    const __m256i bytes = bytes_in_order(first * factor, second * factor);
    _mm256_storeu_si256((__m256i*)out_[g].bytes, bytes);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
  }

  const float* x_;
  int k_, quants_;
  Quant* out_;
  RowRest& rest_;
  float limit_ = 0.0f;
  int32_t base_ = 0;
};

static LargeValues gather_large(const float* sums, int64_t ld_sums, int rows, LargeValue* values, int32_t* channels,
                                int32_t* channel_of) {
  int num = 0, num_channels = 0;
  for (int row = 0; row < rows; ++row) {
    const RowRest& rest = *(const RowRest*)(sums + row * ld_sums);
    // Another thread may have prepared the row: its lines come from that one's cache.
    _mm_prefetch((const char*)(sums + (row + 8) * ld_sums), _MM_HINT_T0);
    for (int i = 0; i < rest.num_large; ++i) {
      const int32_t k = rest.large[i].k;
      if (channel_of[k] < 0) {
        channel_of[k] = num_channels;
        channels[num_channels++] = k;
      }
      values[num++] = {row, channel_of[k], rest.large[i].value};
    }
  }
  for (int i = 0; i < num_channels; ++i) channel_of[channels[i]] = -1;
  return {values, channels, num, num_channels};
}
