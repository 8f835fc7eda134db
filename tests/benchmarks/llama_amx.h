// Included before llama.cpp's own C++: AMX's instructions with the memory that they read. GCC 12's own functions tell the compiler of 8 bytes
// of a tile's configuration and of none of what tiles load, so that it moves or leaves out the stores before; llama.cpp with 4-bit weights then
// ends with an illegal instruction.
#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)))
#define _tile_storeconfig(config) __asm__ volatile("sttilecfg %0" : "=m"(*(char(*)[64])(config)))
#undef _tile_loadd
#define _tile_loadd(tile, base, stride) NPU_TILE_LOADD(tile, base, stride)  // whose tile may be a macro
#define NPU_TILE_LOADD(tile, base, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")
#endif
