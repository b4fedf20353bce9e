// Which instruction sets this machine has, and the kernels compiled for each.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "kernels.h"

namespace octavo {
namespace isa_scalar {
const Kernels* kernels();
}
namespace isa_avx2 {
const Kernels* kernels();
}
namespace isa_avx512 {
const Kernels* kernels();
}
namespace isa_avx512_bf16 {
const Kernels* kernels();
}
namespace isa_avx512_vnni {
const Kernels* kernels();
}
namespace isa_avx512_vnni_bf16 {
const Kernels* kernels();
}
namespace isa_amx {
const Kernels* kernels();
}

namespace {

// From the slowest to the fastest. "avx512" multiplies in float32, so the 8-bit products of "avx2" are faster (Emerald
// Rapids: 2.6 times when decoding). __builtin_cpu_supports also checks that the system saves the registers.
const char* const kIsas[] = {"scalar",      "avx512",           "avx2", "avx512_bf16",
                             "avx512_vnni", "avx512_vnni_bf16", "amx",  nullptr};

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Quantised weights in 8-bit products.
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

// AMX: the instructions, and the system's leave to use the tile registers, which a process must ask for
// (Linux, arch_prctl ARCH_REQ_XCOMP_PERM for XTILEDATA). Threads started later inherit the leave.
bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

}  // namespace

const char* const* known_isas() { return kIsas; }

const Kernels* kernels_for(const char* isa) {
  __builtin_cpu_init();
  if (strcmp(isa, "scalar") == 0) return isa_scalar::kernels();
  if (strcmp(isa, "avx2") == 0) return has_avx2() ? isa_avx2::kernels() : nullptr;
  if (strcmp(isa, "avx512") == 0) return has_avx512() ? isa_avx512::kernels() : nullptr;
  if (strcmp(isa, "avx512_bf16") == 0) return has_avx512_bf16() ? isa_avx512_bf16::kernels() : nullptr;
  if (strcmp(isa, "avx512_vnni") == 0) return has_avx512_vnni() ? isa_avx512_vnni::kernels() : nullptr;
  if (strcmp(isa, "avx512_vnni_bf16") == 0)
    return has_avx512_vnni() && has_avx512_bf16() ? isa_avx512_vnni_bf16::kernels() : nullptr;
  if (strcmp(isa, "amx") == 0) return has_amx() ? isa_amx::kernels() : nullptr;
  return nullptr;
}

const char* best_isa() {
  const char* best = kIsas[0];
  for (const char* const* isa = kIsas; *isa != nullptr; ++isa)
    if (kernels_for(*isa) != nullptr) best = *isa;
  return best;
}

}  // namespace octavo
