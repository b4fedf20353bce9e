// Binds the measurement of the machine's limits.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bench.h"
#include "kernels.h"

namespace octavo {

// Throws ValueError, naming the argument.
inline void check_reading(const std::string& isa, int threads, size_t dram_bytes) {
  namespace nb = nanobind;
  if (isa == "auto" || kernels_for(isa.c_str()) == nullptr)
    throw nb::value_error(("this machine has no kernels for " + isa).c_str());
  if (threads < 1 || threads > 1024) throw nb::value_error("threads must lie between 1 and 1024");
  if (dram_bytes < ((size_t)4 << 20) * threads || dram_bytes > ((size_t)1 << 40))
    throw nb::value_error("dram_bytes must be at least 4 MiB a thread, and at most 1 TiB");
}
inline void check_seconds(double seconds) {
  if (!(seconds > 0.0 && seconds <= 60.0)) throw nanobind::value_error("seconds must lie between 0 and 60");
}

inline void bind_bench(nanobind::module_& m) {
  namespace nb = nanobind;
  using namespace nb::literals;
  m.def(
      "measure_limits",
      [](const std::string& isa, int threads, double seconds, size_t dram_bytes) {
        check_reading(isa, threads, dram_bytes);
        check_seconds(seconds);
        std::vector<std::pair<std::string, double>> limits;
        {
          nb::gil_scoped_release release;
          limits = measure_limits(isa, threads, seconds, dram_bytes);
        }
        nb::dict out;
        for (const auto& [name, rate] : limits) out[name.c_str()] = rate;
        return out;
      },
      "isa"_a, "threads"_a, "seconds"_a, "dram_bytes"_a,
      "Rates that this machine reaches at most, per second: see csrc/bench.h for the names.");
  nb::class_<MemoryReader>(m, "MemoryReader", "Reads its own memory: what this machine gives at a certain moment.")
      .def(
          "__init__",
          [](MemoryReader* self, const std::string& isa, int threads, size_t dram_bytes) {
            check_reading(isa, threads, dram_bytes);
            new (self) MemoryReader(isa, threads, dram_bytes);
          },
          "isa"_a, "threads"_a, "dram_bytes"_a)
      .def(
          "rate",
          [](MemoryReader& self, double seconds) {
            check_seconds(seconds);
            nb::gil_scoped_release release;
            return self.rate(seconds);
          },
          "seconds"_a, "Bytes per second of all threads together, over about `seconds`.");
}

}  // namespace octavo
