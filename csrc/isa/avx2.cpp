// Kernels for "avx2"; compiled with that instruction set's flags (see CMakeLists.txt).
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../kernels.h"

#define OCTAVO_ISA_AVX2 1

#define OCTAVO_ISA_NAME "avx2"

namespace octavo::isa_avx2 {
#include "kernels_body.inl"
const Kernels* kernels() { return &kKernels; }
}  // namespace octavo::isa_avx2
