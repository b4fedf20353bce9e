// Included before every C++ file of llama.cpp when it is built here.
//
// GCC 12's _tile_loadconfig tells the optimiser that ldtilecfg reads eight bytes instead of 64, so most of a
// configuration on the stack is never written and the instruction faults. This one names all of it.
#pragma once
#ifdef __AMX_TILE__
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#endif
