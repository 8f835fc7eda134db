#include "distributed/copies.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace npu {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kFew = 512;  // bytes that are faster through the caches

void copy_plainly(char* to, char* also_to, const char* from, size_t bytes) {
  copy_bytes(to, from, bytes);
  if (also_to) copy_bytes(also_to, from, bytes);
}

#if defined(__SSE2__)
// Whole lines, to where lines begin.
template <bool twice>
void stream_lines(char* to, char* also_to, const char* from, size_t bytes) {
  for (size_t line = 0; line < bytes; line += kLine) {
    for (size_t at = line; at < line + kLine; at += sizeof(__m128i)) {
      const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), part);
      if (twice) _mm_storeu_si128(reinterpret_cast<__m128i*>(also_to + at), part);
    }
  }
  _mm_sfence();  // before whatever tells others that it is there
}

template <bool twice>
void copy(char* to, char* also_to, const char* from, size_t bytes) {
  if (bytes < kFew) return copy_plainly(to, also_to, from, bytes);
  const size_t before = -reinterpret_cast<uintptr_t>(to) % kLine, lines = (bytes - before) / kLine * kLine, behind = before + lines;
  auto also = [also_to](size_t at) { return twice ? also_to + at : nullptr; };
  copy_plainly(to, also(0), from, before);
  stream_lines<twice>(to + before, also(before), from + before, lines);
  copy_plainly(to + behind, also(behind), from + behind, bytes - behind);
}
#else
template <bool twice>
void copy(char* to, char* also_to, const char* from, size_t bytes) {
  copy_plainly(to, also_to, from, bytes);
}
#endif

#if defined(__x86_64__)
constexpr unsigned kZen5 = 26;

// AMD's number of a generation: 25 for Zen 3 and 4, 26 for Zen 5.
unsigned family() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid(1, &a, &b, &c, &d);
  return (a >> 8 & 0xf) + (a >> 20 & 0xff);
}
#endif

// Measured on a Zen 4, a Zen 5 and a Xeon of the fifth generation (docs/benchmarks, collectives). On the Zen 5, 128 KiB of two ranks are summed in 4 or
// 9 us through the caches, by whether the host has put both on one, and in 11 to 13 past them.
bool pass_through_caches() {
#if defined(__x86_64__)
  static const bool they_do = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") || (__builtin_cpu_is("amd") && family() >= kZen5);
  }();
  return they_do;
#else
  return false;
#endif
}

}  // namespace

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

void copy_past_caches(void* to, const void* from, size_t bytes) {
  copy<false>(static_cast<char*>(to), nullptr, static_cast<const char*>(from), bytes);
}

void copy_past_caches_and_to(void* to, void* also_to, const void* from, size_t bytes) {
  copy<true>(static_cast<char*>(to), static_cast<char*>(also_to), static_cast<const char*>(from), bytes);
}

void copy_into_slot(void* to, const void* from, size_t bytes) {
  if (pass_through_caches()) return copy_bytes(to, from, bytes);
  copy_past_caches(to, from, bytes);
}

void copy_into_slot_and_to(void* to, void* also_to, const void* from, size_t bytes) {
  if (pass_through_caches()) return copy_plainly(static_cast<char*>(to), static_cast<char*>(also_to), static_cast<const char*>(from), bytes);
  copy_past_caches_and_to(to, also_to, from, bytes);
}

}  // namespace npu
