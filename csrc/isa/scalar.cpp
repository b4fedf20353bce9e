// Kernels for "scalar"; compiled with that instruction set's flags (see CMakeLists.txt).
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../kernels.h"

#define OCTAVO_ISA_SCALAR 1

#define OCTAVO_ISA_NAME "scalar"

namespace octavo::isa_scalar {
#include "kernels_body.inl"
const Kernels* kernels() { return &kKernels; }
}  // namespace octavo::isa_scalar
