// Kernels for "avx512_vnni_bf16"; compiled with that instruction set's flags (see CMakeLists.txt).
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../kernels.h"

#define OCTAVO_ISA_AVX512 1
#define OCTAVO_ISA_BF16 1
#define OCTAVO_ISA_VNNI 1
#define OCTAVO_ISA_NAME "avx512_vnni_bf16"

namespace octavo::isa_avx512_vnni_bf16 {
#include "kernels_body.inl"
const Kernels* kernels() { return &kKernels; }
}  // namespace octavo::isa_avx512_vnni_bf16
