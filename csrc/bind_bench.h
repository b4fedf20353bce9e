// Binds the measurement of the machine's limits.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bench.h"
#include "kernels.h"

namespace octavo {

inline void bind_bench(nanobind::module_& m) {
  namespace nb = nanobind;
  using namespace nb::literals;
  m.def(
      "measure_limits",
      [](const std::string& isa, int threads, double seconds, size_t dram_bytes) {
        if (isa == "auto" || kernels_for(isa.c_str()) == nullptr)
          throw nb::value_error(("this machine has no kernels for " + isa).c_str());
        if (threads < 1 || threads > 1024) throw nb::value_error("threads must lie between 1 and 1024");
        if (!(seconds > 0.0 && seconds <= 60.0)) throw nb::value_error("seconds must lie between 0 and 60");
        if (dram_bytes < ((size_t)4 << 20) * threads || dram_bytes > ((size_t)1 << 40))
          throw nb::value_error("dram_bytes must be at least 4 MiB a thread, and at most 1 TiB");
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
}

}  // namespace octavo
