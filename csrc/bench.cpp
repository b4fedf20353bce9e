#include "bench.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr int kParts = 5;
constexpr size_t kCacheBytes = 16 << 20;
constexpr size_t kPieceBytes = 4 << 20;  // what a thread reads before it looks at the clock

// Runs work(thread) over and over on all threads at once, for `seconds` in each of kParts parts. work returns the
// operations (or bytes) of one call. The rate of a part is the sum of the threads' own rates.
template <class F>
double best_rate(int num_threads, double seconds, const F& work) {
  std::vector<double> rates((size_t)num_threads * kParts);
  std::atomic<int> arrived{0};
  auto run = [&](int thread) {
    work(thread);  // first touch, and clocks up
    for (int part = 0; part < kParts; ++part) {
      arrived.fetch_add(1);
      while (arrived.load() < (part + 1) * num_threads) std::this_thread::yield();
      double done = 0.0, elapsed = 0.0;
      const auto start = Clock::now();
      do {
        done += work(thread);
        elapsed = seconds_since(start);
      } while (elapsed < seconds / kParts);
      rates[(size_t)part * num_threads + thread] = done / elapsed;
    }
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < num_threads; ++t) threads.emplace_back(run, t);
  run(0);
  for (auto& t : threads) t.join();
  double best = 0.0;
  for (int part = 0; part < kParts; ++part) {
    double sum = 0.0;
    for (int t = 0; t < num_threads; ++t) sum += rates[(size_t)part * num_threads + t];
    best = std::max(best, sum);
  }
  return best;
}

// ------------------------------------------------------------------ reading memory

uint64_t sum_scalar(const uint64_t* p, size_t n) {
  uint64_t s[8] = {};
  for (size_t i = 0; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) s[j] += p[i + j];
  return s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}

__attribute__((target("avx2"))) uint64_t sum_avx2(const uint64_t* p, size_t n) {
  __m256i s0 = _mm256_setzero_si256(), s1 = s0, s2 = s0, s3 = s0;
  for (size_t i = 0; i + 16 <= n; i += 16) {
    s0 = _mm256_add_epi64(s0, _mm256_loadu_si256((const __m256i*)(p + i)));
    s1 = _mm256_add_epi64(s1, _mm256_loadu_si256((const __m256i*)(p + i + 4)));
    s2 = _mm256_add_epi64(s2, _mm256_loadu_si256((const __m256i*)(p + i + 8)));
    s3 = _mm256_add_epi64(s3, _mm256_loadu_si256((const __m256i*)(p + i + 12)));
  }
  alignas(32) uint64_t out[4];
  _mm256_store_si256((__m256i*)out, _mm256_add_epi64(_mm256_add_epi64(s0, s1), _mm256_add_epi64(s2, s3)));
  return out[0] + out[1] + out[2] + out[3];
}

__attribute__((target("avx512f"))) uint64_t sum_avx512(const uint64_t* p, size_t n) {
  __m512i s0 = _mm512_setzero_si512(), s1 = s0, s2 = s0, s3 = s0;
  for (size_t i = 0; i + 32 <= n; i += 32) {
    s0 = _mm512_add_epi64(s0, _mm512_loadu_si512(p + i));
    s1 = _mm512_add_epi64(s1, _mm512_loadu_si512(p + i + 8));
    s2 = _mm512_add_epi64(s2, _mm512_loadu_si512(p + i + 16));
    s3 = _mm512_add_epi64(s3, _mm512_loadu_si512(p + i + 24));
  }
  alignas(64) uint64_t out[8];
  _mm512_store_si512(out, _mm512_add_epi64(_mm512_add_epi64(s0, s1), _mm512_add_epi64(s2, s3)));
  return sum_scalar(out, 8);
}

uint64_t (*sum_of(const std::string& isa))(const uint64_t*, size_t) {
  return isa == "amx" || isa.starts_with("avx512") ? sum_avx512 : isa == "avx2" ? sum_avx2 : sum_scalar;
}

std::vector<ReadBuffer> read_buffers(const std::string& isa, int num_threads, size_t bytes_each) {
  std::vector<ReadBuffer> buffers;
  for (int t = 0; t < num_threads; ++t) buffers.emplace_back(isa, bytes_each);
  return buffers;
}

// ------------------------------------------------------------------ arithmetic
//
// Independent accumulators in registers, more than latency times throughput (8 to 10 on current cores) asks for.
// `+v` in an empty asm keeps the compiler from folding the loop.

constexpr int kLoops = 20000;

double fma_scalar(int) {
  float a[16];
  for (int i = 0; i < 16; ++i) a[i] = (float)i;
  for (int n = 0; n < kLoops; ++n)
    for (int i = 0; i < 16; ++i) {
      a[i] = a[i] * 0.999f + 0.5f;
      asm volatile("" : "+x"(a[i]));
    }
  return 2.0 * 16 * kLoops;
}

#define OCTAVO_CHAINS(type, init, step, keep)                                        \
  type c0 = init, c1 = c0, c2 = c0, c3 = c0, c4 = c0, c5 = c0;                       \
  type c6 = c0, c7 = c0, c8 = c0, c9 = c0, c10 = c0, c11 = c0;                       \
  for (int n = 0; n < kLoops; ++n) {                                                 \
    c0 = step(c0), c1 = step(c1), c2 = step(c2), c3 = step(c3);                      \
    c4 = step(c4), c5 = step(c5), c6 = step(c6), c7 = step(c7);                      \
    c8 = step(c8), c9 = step(c9), c10 = step(c10), c11 = step(c11);                  \
    asm volatile("" : keep(c0), keep(c1), keep(c2), keep(c3), keep(c4), keep(c5));   \
    asm volatile("" : keep(c6), keep(c7), keep(c8), keep(c9), keep(c10), keep(c11)); \
  }
constexpr int kChains = 12;

__attribute__((target("avx2,fma"))) double fma_avx2(int) {
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.5f);
#define OCTAVO_STEP(c) _mm256_fmadd_ps(c, a, b)
  OCTAVO_CHAINS(__m256, _mm256_set1_ps(1.0f), OCTAVO_STEP, "+x")
#undef OCTAVO_STEP
  return 2.0 * 8 * kChains * kLoops;
}

// vpmaddubsw and the addition that a sum of its products needs.
__attribute__((target("avx2"))) double dot_int8_avx2(int) {
  const __m256i a = _mm256_set1_epi8(1), b = _mm256_set1_epi8(1);
#define OCTAVO_STEP(c) _mm256_add_epi16(c, _mm256_maddubs_epi16(keep_apart(a), b))
  const auto keep_apart = [](__m256i v) __attribute__((target("avx2"), always_inline)) {
    asm volatile("" : "+x"(v));  // else the product is computed once
    return v;
  };
  OCTAVO_CHAINS(__m256i, _mm256_set1_epi16(1), OCTAVO_STEP, "+x")
#undef OCTAVO_STEP
  return 2.0 * 32 * kChains * kLoops;
}

__attribute__((target("avx512f"))) double fma_avx512(int) {
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.5f);
#define OCTAVO_STEP(c) _mm512_fmadd_ps(c, a, b)
  OCTAVO_CHAINS(__m512, _mm512_set1_ps(1.0f), OCTAVO_STEP, "+v")
#undef OCTAVO_STEP
  return 2.0 * 16 * kChains * kLoops;
}

__attribute__((target("avx512f,avx512bf16"))) double dot_bf16(int) {
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f00), b = (__m512bh)_mm512_set1_epi16(0x3c00);  // 0.5, 2^-7
#define OCTAVO_STEP(c) _mm512_dpbf16_ps(c, a, b)
  OCTAVO_CHAINS(__m512, _mm512_set1_ps(1.0f), OCTAVO_STEP, "+v")
#undef OCTAVO_STEP
  return 2.0 * 32 * kChains * kLoops;
}

__attribute__((target("avx512f,avx512vnni"))) double dot_int8(int) {
  const __m512i a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(1);
#define OCTAVO_STEP(c) _mm512_dpbusd_epi32(c, a, b)
  OCTAVO_CHAINS(__m512i, _mm512_set1_epi32(1), OCTAVO_STEP, "+v")
#undef OCTAVO_STEP
  return 2.0 * 64 * kChains * kLoops;
}

// Four tiles of accumulators over two and two of inputs, as a matrix product would use the eight there are.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// Not a local: GCC 12 tells the optimiser only of the first eight bytes that the instruction reads.
const TileConfig kTileConfig;

#define OCTAVO_TILES(product)        \
  _tile_loadconfig(&kTileConfig);    \
  _tile_zero(0);                     \
  _tile_zero(1);                     \
  _tile_zero(2);                     \
  _tile_zero(3);                     \
  _tile_zero(4);                     \
  _tile_zero(5);                     \
  _tile_zero(6);                     \
  _tile_zero(7);                     \
  for (int n = 0; n < kLoops; ++n) { \
    product(0, 4, 6);                \
    product(1, 4, 7);                \
    product(2, 5, 6);                \
    product(3, 5, 7);                \
  }                                  \
  _tile_release()

__attribute__((target("amx-tile,amx-bf16"))) double amx_bf16(int) {
  OCTAVO_TILES(_tile_dpbf16ps);
  return 2.0 * 16 * 16 * 32 * 4 * kLoops;
}

__attribute__((target("amx-tile,amx-int8"))) double amx_int8(int) {
  OCTAVO_TILES(_tile_dpbssd);
  return 2.0 * 16 * 16 * 64 * 4 * kLoops;
}

}  // namespace

std::vector<std::pair<std::string, double>> measure_limits(const std::string& isa, int num_threads, double seconds,
                                                           size_t dram_bytes) {
  std::vector<std::pair<std::string, double>> limits;
  const auto measure = [&](const char* name, double (*work)(int)) {
    limits.emplace_back(name, best_rate(num_threads, seconds, work));
  };
  const bool amx = isa == "amx", bf16 = amx || isa.ends_with("_bf16"), avx512 = amx || isa.starts_with("avx512");
  const auto measure_reading = [&](const char* name, size_t bytes_each) {
    std::vector<ReadBuffer> buffers = read_buffers(isa, num_threads, bytes_each);
    limits.emplace_back(name, best_rate(num_threads, seconds, [&](int thread) { return buffers[thread].read(); }));
  };
  measure_reading("dram_read", dram_bytes / num_threads);
  measure_reading("cache_read", kCacheBytes);
  measure("fma_f32", avx512 ? fma_avx512 : isa == "avx2" ? fma_avx2 : fma_scalar);
  if (bf16) measure("dot_bf16", dot_bf16);
  if (avx512 && __builtin_cpu_supports("avx512vnni")) measure("dot_int8", dot_int8);
  if (isa == "avx2") measure("dot_int8", dot_int8_avx2);
  if (amx) measure("amx_bf16", amx_bf16);
  if (amx) measure("amx_int8", amx_int8);
  return limits;
}

ReadBuffer::ReadBuffer(const std::string& isa, size_t bytes) : sum_(sum_of(isa)), pieces_(bytes / kPieceBytes) {}

double ReadBuffer::read() {
  if (!memory_) {
    memory_.reset(new uint64_t[pieces_ * kPieceBytes / 8]);
    memset(memory_.get(), 1, pieces_ * kPieceBytes);
  }
  sink_ += sum_(memory_.get() + at_ * (kPieceBytes / 8), kPieceBytes / 8);
  asm volatile("" : : "g"(&sink_) : "memory");  // else nothing would need to be read
  at_ = (at_ + 1) % pieces_;
  return (double)kPieceBytes;
}

MemoryReader::MemoryReader(const std::string& isa, int num_threads, size_t bytes)
    : buffers_(read_buffers(isa, num_threads, bytes / (size_t)num_threads)) {}

double MemoryReader::rate(double seconds) {
  std::atomic<double> total{0.0};
  const auto run = [&](size_t thread) {
    double done = 0.0, elapsed = 0.0;
    buffers_[thread].read();  // the first time fills it
    const auto start = Clock::now();
    do {
      done += buffers_[thread].read();
      elapsed = seconds_since(start);
    } while (elapsed < seconds);
    total.fetch_add(done / elapsed);
  };
  std::vector<std::thread> threads;
  for (size_t t = 1; t < buffers_.size(); ++t) threads.emplace_back(run, t);
  run(0);
  for (std::thread& t : threads) t.join();
  return total.load();
}

}  // namespace octavo
