// A vector of 16 floats with the same lane semantics on every instruction set.
//
// Included by each isa/*.cpp inside its own namespace, so that no inline function is ever shared between
// translation units compiled with different flags (that would break the one-definition rule). All
// contraction is explicit (fma); the files are compiled with -ffp-contract=off, so that the same expression
// rounds the same way in every instantiation (law 1). The scalar flavour has no fused multiply-add.
//
// No #include here: the including file has included <immintrin.h>, <cstdint>, <cstring>, <cmath> already.

static constexpr int kLanes = 16;

#if defined(OCTAVO_ISA_AVX512)

struct V16 {
  __m512 v;
  static inline V16 zero() { return {_mm512_setzero_ps()}; }
  static inline V16 set1(float x) { return {_mm512_set1_ps(x)}; }
  static inline V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static inline V16 load_partial(const float* p, int n) {
    return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p)};
  }
  inline void store(float* p) const { _mm512_storeu_ps(p, v); }
  inline void store_partial(float* p, int n) const { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), v); }
};
static inline V16 operator+(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline V16 operator-(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline V16 operator*(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline V16 operator/(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline V16 round_nearest(V16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x * 2^n for integral n in [-126, 128] and x below 2.
static inline V16 times_pow2(V16 x, V16 n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// Lane i: a < b ? x : y.
static inline V16 select_lt(V16 a, V16 b, V16 x, V16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// Lanes outside [lo, hi) become `fill`; 0 <= lo, hi <= 16.
static inline V16 keep_range(V16 x, int lo, int hi, float fill) {
  const __mmask16 m = (__mmask16)(((1u << hi) - 1u) & ~((1u << lo) - 1u));
  return {_mm512_mask_blend_ps(m, _mm512_set1_ps(fill), x.v)};
}
static inline V16 load_bf16(const uint16_t* p) {
  const __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
static inline V16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
// Lane i: the unsigned 4-bit field of p[i] that starts at bit `shift`.
static inline V16 load_nibble(const uint32_t* p, int shift) {
  const __m512i w = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(shift));
  return {_mm512_cvtepi32_ps(_mm512_and_si512(w, _mm512_set1_epi32(15)))};
}
// Lane i: the signed byte p[2 i + h].
static inline V16 load_i8_pair(const int8_t* p, int h) {
  const __m512i w = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_cvtepi32_ps(h ? _mm512_srai_epi32(w, 8) : _mm512_srai_epi32(_mm512_slli_epi32(w, 24), 24))};
}
static inline V16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
// Lane i: the bf16 p[2 i + h].
static inline V16 load_bf16_pair(const uint16_t* p, int h) {
  const __m512i w = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(h ? _mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u)) : _mm512_slli_epi32(w, 16))};
}
static inline void to_array(V16 a, float* out) { _mm512_storeu_ps(out, a.v); }

#elif defined(OCTAVO_ISA_AVX2)

struct V16 {
  __m256 a, b;
  static inline V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static inline V16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static inline V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static inline V16 load_partial(const float* p, int n) {
    float t[16] = {};
    for (int i = 0; i < n; ++i) t[i] = p[i];
    return load(t);
  }
  inline void store(float* p) const {
    _mm256_storeu_ps(p, a);
    _mm256_storeu_ps(p + 8, b);
  }
  inline void store_partial(float* p, int n) const {
    float t[16];
    store(t);
    for (int i = 0; i < n; ++i) p[i] = t[i];
  }
};
static inline V16 operator+(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V16 operator-(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V16 operator*(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V16 operator/(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V16 max(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline V16 min(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline V16 round_nearest(V16 x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline V16 pow2(V16 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.a), bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.b), bias), 23))};
}
static inline V16 times_pow2(V16 x, V16 n) { return x * pow2(min(n, V16::set1(127.0f))); }
static inline V16 select_lt(V16 p, V16 q, V16 x, V16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ))};
}
static inline V16 keep_range(V16 x, int lo, int hi, float fill) {
  const __m256i l = _mm256_set1_epi32(lo), h = _mm256_set1_epi32(hi);
  const __m256i i0 = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i i1 = _mm256_add_epi32(i0, _mm256_set1_epi32(8));
  const __m256i k0 = _mm256_andnot_si256(_mm256_cmpgt_epi32(l, i0), _mm256_cmpgt_epi32(h, i0));
  const __m256i k1 = _mm256_andnot_si256(_mm256_cmpgt_epi32(l, i1), _mm256_cmpgt_epi32(h, i1));
  const __m256 f = _mm256_set1_ps(fill);
  return {_mm256_blendv_ps(f, x.a, _mm256_castsi256_ps(k0)), _mm256_blendv_ps(f, x.b, _mm256_castsi256_ps(k1))};
}
static inline V16 load_bf16(const uint16_t* p) {
  const __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
static inline V16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline V16 load_nibble(const uint32_t* p, int shift) {
  const __m128i s = _mm_cvtsi32_si128(shift);
  const __m256i mask = _mm256_set1_epi32(15);
  const __m256i lo = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i*)p), s);
  const __m256i hi = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i*)(p + 8)), s);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(lo, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(hi, mask))};
}
static inline __m256 i8_half_pair(const int8_t* p, int h) {
  const __m256i w = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_cvtepi32_ps(h ? _mm256_srai_epi32(w, 8) : _mm256_srai_epi32(_mm256_slli_epi32(w, 24), 24));
}
static inline V16 load_i8_pair(const int8_t* p, int h) { return {i8_half_pair(p, h), i8_half_pair(p + 16, h)}; }
static inline __m256 i8_half(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline V16 load_i8(const int8_t* p) { return {i8_half(p), i8_half(p + 8)}; }
static inline __m256 bf16_half_pair(const uint16_t* p, int h) {
  const __m256i w = _mm256_loadu_si256((const __m256i*)p);
  const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
  return _mm256_castsi256_ps(h ? _mm256_and_si256(w, high) : _mm256_slli_epi32(w, 16));
}
static inline V16 load_bf16_pair(const uint16_t* p, int h) { return {bf16_half_pair(p, h), bf16_half_pair(p + 16, h)}; }
// a0 b0 a1 b1 ... of two halves, and back.
static inline V16 interleave(V16 x) {
  const __m256 low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
static inline V16 deinterleave(V16 x) {
  const __m256 low = _mm256_permute2f128_ps(x.a, x.b, 0x20), high = _mm256_permute2f128_ps(x.a, x.b, 0x31);
  return {_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd)};
}
static inline void to_array(V16 x, float* out) { x.store(out); }

#else  // scalar: plain loops, which the compiler may turn into baseline SSE2

struct V16 {
  float v[16];
  static inline V16 zero() { return set1(0.0f); }
  static inline V16 set1(float x) {
    V16 r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
  }
  static inline V16 load(const float* p) {
    V16 r;
    for (int i = 0; i < 16; ++i) r.v[i] = p[i];
    return r;
  }
  static inline V16 load_partial(const float* p, int n) {
    V16 r = zero();
    for (int i = 0; i < n; ++i) r.v[i] = p[i];
    return r;
  }
  inline void store(float* p) const {
    for (int i = 0; i < 16; ++i) p[i] = v[i];
  }
  inline void store_partial(float* p, int n) const {
    for (int i = 0; i < n; ++i) p[i] = v[i];
  }
};
#define OCTAVO_LANEWISE(expr)                   \
  V16 r;                                        \
  for (int i = 0; i < 16; ++i) r.v[i] = (expr); \
  return r
static inline V16 operator+(V16 a, V16 b) { OCTAVO_LANEWISE(a.v[i] + b.v[i]); }
static inline V16 operator-(V16 a, V16 b) { OCTAVO_LANEWISE(a.v[i] - b.v[i]); }
static inline V16 operator*(V16 a, V16 b) { OCTAVO_LANEWISE(a.v[i] * b.v[i]); }
static inline V16 operator/(V16 a, V16 b) { OCTAVO_LANEWISE(a.v[i] / b.v[i]); }
static inline V16 fma(V16 a, V16 b, V16 c) { OCTAVO_LANEWISE(a.v[i] * b.v[i] + c.v[i]); }
static inline V16 max(V16 a, V16 b) { OCTAVO_LANEWISE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline V16 min(V16 a, V16 b) { OCTAVO_LANEWISE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
// Adding and taking away 1.5 * 2^23 rounds to the nearest integer; right for |x| < 2^22.
static inline V16 round_nearest(V16 a) {
  V16 r;
  for (int i = 0; i < 16; ++i) {
    volatile float t = a.v[i] + 12582912.0f;
    r.v[i] = t - 12582912.0f;
  }
  return r;
}
static inline V16 pow2(V16 n) {
  V16 r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = (uint32_t)((int32_t)n.v[i] + 127) << 23;
    memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
static inline V16 times_pow2(V16 x, V16 n) { return x * pow2(min(n, V16::set1(127.0f))); }
static inline V16 select_lt(V16 a, V16 b, V16 x, V16 y) { OCTAVO_LANEWISE(a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }
static inline V16 keep_range(V16 x, int lo, int hi, float fill) { OCTAVO_LANEWISE(i >= lo && i < hi ? x.v[i] : fill); }
static inline V16 load_bf16(const uint16_t* p) {
  V16 r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = (uint32_t)p[i] << 16;
    memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
static inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  float value;
  if (exponent == 0) {
    value = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24: subnormal or zero
  } else {
    const uint32_t bits =
        exponent == 31 ? (0x7f800000u | (mantissa << 13)) : ((exponent + 112u) << 23 | mantissa << 13);
    memcpy(&value, &bits, 4);
  }
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}
static inline V16 load_f16(const uint16_t* p) { OCTAVO_LANEWISE(half_to_float(p[i])); }
static inline V16 load_nibble(const uint32_t* p, int shift) { OCTAVO_LANEWISE((float)((p[i] >> shift) & 15u)); }
static inline V16 load_i8_pair(const int8_t* p, int h) { OCTAVO_LANEWISE((float)p[2 * i + h]); }
static inline V16 load_i8(const int8_t* p) { OCTAVO_LANEWISE((float)p[i]); }
static inline V16 load_bf16_pair(const uint16_t* p, int h) {
  V16 r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = (uint32_t)p[2 * i + h] << 16;
    memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
static inline void to_array(V16 a, float* out) { a.store(out); }
#undef OCTAVO_LANEWISE

#endif

// Horizontal sum and maximum as a fixed binary tree, lane i with lane i + 8, then 4, 2, 1: the same bits on every
// instruction set.
#if defined(OCTAVO_ISA_AVX512) || defined(OCTAVO_ISA_AVX2)
#if defined(OCTAVO_ISA_AVX512)
static inline __m256 lower_half(V16 x) { return _mm512_castps512_ps256(x.v); }
static inline __m256 upper_half(V16 x) { return _mm512_extractf32x8_ps(x.v, 1); }
#else
static inline __m256 lower_half(V16 x) { return x.a; }
static inline __m256 upper_half(V16 x) { return x.b; }
#endif
static inline float hsum(V16 x) {
  const __m256 eight = _mm256_add_ps(lower_half(x), upper_half(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float hmax(V16 x) {
  const __m256 eight = _mm256_max_ps(lower_half(x), upper_half(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
static inline float hsum(V16 x) {
  float t[16];
  to_array(x, t);
  for (int w = 8; w >= 1; w /= 2)
    for (int i = 0; i < w; ++i) t[i] = t[i] + t[i + w];
  return t[0];
}
static inline float hmax(V16 x) {
  float t[16];
  to_array(x, t);
  for (int w = 8; w >= 1; w /= 2)
    for (int i = 0; i < w; ++i) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
  return t[0];
}
#endif

// e^x, about 1 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, degree-6 polynomial for e^r (coefficients of the
// Cephes library's expf). 0 below -87.33 (also for -inf); saturates near the largest float above 88.37.
static inline V16 exp16(V16 x) {
  const V16 low = V16::set1(-87.33f);
  const V16 y = min(max(x, low), V16::set1(88.37f));
  const V16 n = round_nearest(y * V16::set1(1.44269504088896341f));
  V16 r = fma(n, V16::set1(-0.693359375f), y);
  r = fma(n, V16::set1(2.12194440e-4f), r);
  V16 p = V16::set1(1.9875691500e-4f);
  p = fma(p, r, V16::set1(1.3981999507e-3f));
  p = fma(p, r, V16::set1(8.3334519073e-3f));
  p = fma(p, r, V16::set1(4.1665795894e-2f));
  p = fma(p, r, V16::set1(1.6666665459e-1f));
  p = fma(p, r, V16::set1(5.0000001201e-1f));
  p = fma(p * r, r, r + V16::set1(1.0f));
  return select_lt(x, low, V16::zero(), times_pow2(p, n));
}

// 2^x for x <= 0, with a relative error of 1.7e-7; 0 below -126 (also for -inf). 2^n times a polynomial for [-1/2, 1/2]
// whose largest relative error is the least for its degree. Half the operations of exp16.
static inline V16 power_of_two(V16 x) {
  const V16 low = V16::set1(-126.0f), n = round_nearest(max(x, low)), r = x - n;
  V16 p = fma(V16::set1(1.32647261e-3f), r, V16::set1(9.67151299e-3f));
  p = fma(p, r, V16::set1(5.55073358e-2f));
  p = fma(p, r, V16::set1(2.40222424e-1f));
  p = fma(p, r, V16::set1(6.93147004e-1f));
  p = fma(p, r, V16::set1(1.0f));
  return select_lt(x, low, V16::zero(), times_pow2(p, n));
}

// Round-to-nearest-even conversion; NaN stays NaN.
static inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
