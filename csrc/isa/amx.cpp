// Kernels for "amx"; compiled with that instruction set's flags (see CMakeLists.txt).
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../kernels.h"

#define OCTAVO_ISA_AVX512 1
#define OCTAVO_ISA_AMX 1
#define OCTAVO_ISA_NAME "amx"

namespace octavo::isa_amx {
#include "kernels_body.inl"
const Kernels* kernels() { return &kKernels; }
}  // namespace octavo::isa_amx
