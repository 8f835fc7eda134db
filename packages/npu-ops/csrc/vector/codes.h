// Numbers in 8 bits: fp8 (e4m3) and int8. Include it before vector/gemm.h, whose templates then take them as any other type.
#pragma once

#include "vector/vec.h"

namespace npu_ops {

struct fp8 {  // e4m3, torch's float8_e4m3fn
  uint8_t bits;
};

namespace {

// The bits of e4m3 as those of a float, 2^-120 of the value: subnormal codes become subnormal floats. The code for NaN
// counts as 480: the kernels that read codes have no instruction to spare for it. Whoever writes codes with a scale of their own makes
// that NaN, and weights are searched for NaN when they are loaded.
#if defined(NPU_AVX512)
NPU_INLINE U widen_codes(const fp8* p) {
  return (U)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
NPU_INLINE F load(const int8_t* p) {
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#elif defined(__AVX2__)
NPU_INLINE U widen_codes(const fp8* p) { return (U)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
NPU_INLINE F load(const int8_t* p) {
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
#else
NPU_INLINE U widen_codes(const fp8* p) {
  U u;
  for (int i = 0; i < W; ++i) u[i] = static_cast<uint32_t>(static_cast<int8_t>(p[i].bits));
  return u;
}
NPU_INLINE F load(const int8_t* p) {
  F x;
  for (int i = 0; i < W; ++i) x[i] = p[i];
  return x;
}
#endif
NPU_INLINE F load_small(const fp8* p) { return from_bits(widen_codes(p) << 20 & 0x87f00000u); }
NPU_INLINE F load(const fp8* p) { return load_small(p) * set1(0x1p120f); }

// Where products of many values are summed: load_small's need no multiplication if the other factor is kLift times as large,
// and the sum is then multiplied by kDrop. The lift keeps products away from where floats end.
template <class T>
NPU_INLINE F load_small(const T* p) {
  return load(p);
}
template <class T>
constexpr float kLift = 1.f;
template <>
constexpr float kLift<fp8> = 0x1p64f;
template <class T>
constexpr float kDrop = 1.f;
template <>
constexpr float kDrop<fp8> = 0x1p56f;

template <class C>
NPU_INLINE F load_codes(const C* p, int64_t n) {
  if (n >= W) return load(p);
  C tmp[W] = {};
  for (int64_t i = 0; i < n; ++i) tmp[i] = p[i];
  return load(tmp);
}
NPU_INLINE F load_n(const fp8* p, int64_t n) { return load_codes(p, n); }
NPU_INLINE F load_n(const int8_t* p, int64_t n) { return load_codes(p, n); }

// Codes of the first n of x, beyond the largest code saturating; NaN becomes e4m3's code for it, and 0 in int8, which has none.
NPU_INLINE void store_codes(fp8* p, F x, int64_t n) {
  const F bounded = clamped(x, -448.f, 448.f);
  const U u = bits_of(bounded), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
  const U normal = (a - 0x3c000000u + 0x7ffffu + ((a >> 20) & 1u)) >> 20;
  const U subnormal = bits_of(from_bits(a) + set1(16384.f)) - 0x46800000u;  // the addition rounds at 2^-9
  const U code = a < 0x3c800000u ? subnormal : normal;
  const U r = (bounded == bounded ? code : U{} + 0x7fu) | sign;
  for (int i = 0; i < n && i < W; ++i) p[i].bits = static_cast<uint8_t>(r[i]);
}
NPU_INLINE void store_codes(int8_t* p, F x, int64_t n) {
  const F bounded = clamped(x, -127.f, 127.f), shift = set1(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const I r = (I)bits_of((bounded == bounded ? bounded : F{}) + shift) - 0x4b400000;
  for (int i = 0; i < n && i < W; ++i) p[i] = static_cast<int8_t>(r[i]);
}

}  // namespace
}  // namespace npu_ops
