// What this machine can do at most, measured: rates of reading memory and of the arithmetic that kernels use.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace octavo {

// Names and rates per second, in bytes or floating-point (or integer) operations, on `num_threads` threads together:
// "dram_read" (a buffer of `dram_bytes` in all, which should be more than the last cache holds), "cache_read" (16 MiB a
// thread), "fma_f32" with the vectors of `isa`, and as far as `isa` goes and the CPU has them "dot_bf16" (vdpbf16ps),
// "dot_int8" (vpdpbusd), "amx_bf16" and "amx_int8". A product and its addition are two operations. Each measurement
// takes about `seconds`; the best of five parts of it counts, since other processes only ever slow it down. `isa` is
// one that kernels_for() knows on this machine.
std::vector<std::pair<std::string, double>> measure_limits(const std::string& isa, int num_threads, double seconds,
                                                           size_t dram_bytes);

// Memory that one thread reads over and over, piece by piece. That thread fills it at its first read, so that it lies
// near.
class ReadBuffer {
 public:
  ReadBuffer(const std::string& isa, size_t bytes);  // at least 4 MiB
  // Reads the next piece; returns its bytes.
  double read();

 private:
  uint64_t (*sum_)(const uint64_t*, size_t);
  size_t pieces_, at_ = 0;
  std::unique_ptr<uint64_t[]> memory_;
  uint64_t sink_ = 0;
};

// Reads memory of its own, to see what this machine gives at a certain moment: where there are neighbours, a limit that
// was measured minutes ago says little.
class MemoryReader {
 public:
  // `bytes` in all, at least 4 MiB a thread.
  MemoryReader(const std::string& isa, int num_threads, size_t bytes);
  MemoryReader(const MemoryReader&) = delete;
  // Bytes per second of all threads together, over about `seconds`.
  double rate(double seconds);

 private:
  std::vector<ReadBuffer> buffers_;  // one a thread
};

}  // namespace octavo
