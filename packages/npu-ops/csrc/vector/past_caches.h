// Lines written past the caches, for other threads to read from memory.
//
// Where cores have no L3 in common, what one of them has written comes to another slower than memory does: layers of a Zen 4 whose two cores
// were presumably on two L3s lost what some 2.4 GB/s explain. Whoever writes so ends with a fence.
#pragma once

#include "vector/vec.h"

namespace npu_ops {
namespace {

#if defined(NPU_AVX512)

// How a line is written: for the thread itself, or for others, to an address that is a multiple of 64.
struct IntoCache {
  static NPU_INLINE void put(void* to, __m512i line) { memcpy(to, &line, sizeof line); }
};
struct PastCaches {
  static NPU_INLINE void put(void* to, __m512i line) { _mm512_stream_si512(static_cast<__m512i*>(to), line); }
};

// A copy of `bytes`, of which whole lines go past the caches where they begin at a multiple of 64.
NPU_INLINE void copy_past_caches(void* to, const void* from, int64_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  int64_t i = 0;
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0)
    for (; i + 64 <= bytes; i += 64) PastCaches::put(out + i, load_raw<__m512i>(in + i));
  memcpy(out + i, in + i, bytes - i);
}

#else

struct IntoCache {};

#endif

}  // namespace
}  // namespace npu_ops
