// Norms, rotary embedding, activation: memory-bound row operations. Tails are masked, so any width is fine.

static inline int lanes_left(int n, int i) { return n - i < 16 ? n - i : 16; }

static inline float sum_of_squares(const float* x, int n) {
  V16 acc = V16::zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const V16 v = V16::load(x + i);
    acc = fma(v, v, acc);
  }
  if (i < n) {
    const V16 v = V16::load_partial(x + i, n - i);
    acc = fma(v, v, acc);
  }
  return hsum(acc);
}

static void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
  const float inverse = 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps);
  const V16 scale = V16::set1(inverse);
  int i = 0;
  for (; i + 16 <= n; i += 16) ((V16::load(x + i) * scale) * V16::load(weight + i)).store(y + i);
  if (i < n) {
    const int left = n - i;
    ((V16::load_partial(x + i, left) * scale) * V16::load_partial(weight + i, left)).store_partial(y + i, left);
  }
}

static void add(float* x, const float* delta, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) (V16::load(x + i) + V16::load(delta + i)).store(x + i);
  if (i < n) {
    const int left = n - i;
    (V16::load_partial(x + i, left) + V16::load_partial(delta + i, left)).store_partial(x + i, left);
  }
}

static void add_rms_norm(float* x, const float* delta, const float* weight, int n, float eps, float* y) {
  add(x, delta, n);
  rms_norm(x, weight, n, eps, y);
}

// Rotates up to 16 pairs; kWhole: 16.
template <bool kWhole>
static inline void rotate(float* a, float* b, const float* cos, const float* sin, int left) {
  const auto load = [&](const float* p) { return kWhole ? V16::load(p) : V16::load_partial(p, left); };
  const auto store = [&](V16 x, float* p) { kWhole ? x.store(p) : x.store_partial(p, left); };
  const V16 c = load(cos), s = load(sin), u = load(a), v = load(b);
  store(u * c - v * s, a);
  store(v * c + u * s, b);
}

static void rope(float* x, int heads, int head_dim, const float* cos, const float* sin) {
  const int half = head_dim / 2;
  for (int h = 0; h < heads; ++h) {
    float* a = x + (size_t)h * head_dim;
    float* b = a + half;
    int i = 0;
    for (; i + 16 <= half; i += 16) rotate<true>(a + i, b + i, cos + i, sin + i, 16);
    if (i < half) rotate<false>(a + i, b + i, cos + i, sin + i, half - i);
  }
}

#if defined(OCTAVO_ISA_AVX512)
// 1 / d within 1 ulp or so for d >= 1: a 14-bit estimate and one Newton step cost a third of a division.
static inline V16 reciprocal(V16 d) {
  const __m512 r = _mm512_rcp14_ps(d.v);
  return {_mm512_fmadd_ps(r, _mm512_fnmadd_ps(d.v, r, _mm512_set1_ps(1.0f)), r)};
}
#else
static inline V16 reciprocal(V16 d) { return V16::set1(1.0f) / d; }
#endif

static inline V16 silu(V16 x) { return x * reciprocal(V16::set1(1.0f) + exp16(V16::zero() - x)); }

static void silu_mul(const float* gate, const float* up, int n, float* y) {
  int i = 0;
  for (; i + 16 <= n; i += 16) (silu(V16::load(gate + i)) * V16::load(up + i)).store(y + i);
  if (i < n) {
    const int left = n - i;
    (silu(V16::load_partial(gate + i, left)) * V16::load_partial(up + i, left)).store_partial(y + i, left);
  }
}
