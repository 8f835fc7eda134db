// Codes of e4m3 as bf16, which holds all of them: 64 at a time, by bytes.
#pragma once

#include "vector/vec.h"

namespace npu_ops {
namespace {

#if defined(NPU_AVX512)

// A code's bf16 by the seven bits beside its sign, in two parts. NaN is not looked for.
struct E4m3Values {
  uint8_t upper[128], lower[128];
};
constexpr E4m3Values e4m3_values() {
  E4m3Values values{};
  for (int i = 0; i < 128; ++i) {
    const int exponent = i >> 3, fraction = i & 7;
    float value = static_cast<float>(exponent ? 8 + fraction : fraction);
    for (int e = exponent ? exponent : 1; e < 10; ++e) value /= 2;
    for (int e = 10; e < exponent; ++e) value *= 2;
    const uint32_t bits = __builtin_bit_cast(uint32_t, value) >> 16;
    values.upper[i] = static_cast<uint8_t>(bits >> 8), values.lower[i] = static_cast<uint8_t>(bits & 0xff);
  }
  return values;
}
alignas(64) constexpr E4m3Values kE4m3Values = e4m3_values();

constexpr int64_t kCodesAtATime = 64;
typedef uint8_t Codes64 __attribute__((vector_size(64)));
typedef uint16_t Words32of __attribute__((vector_size(64)));

// The upper byte of a bf16 by the sign and the upper three bits of the exponent of a code; the bytes of what has no exponent, by its three
// bits, times 2^-9.
struct E4m3Bytes {
  uint8_t upper[16], small_lower[16], small_upper[16];
};
constexpr E4m3Bytes e4m3_bytes() {
  E4m3Bytes t{};
  for (int i = 0; i < 16; ++i) t.upper[i] = static_cast<uint8_t>((i & 8) << 4 | ((i & 7) + 60));
  for (int i = 1; i < 8; ++i) {
    const int exponent = i < 2 ? 0 : i < 4 ? 1 : 2, bits = (127 - 9 + exponent) << 7 | (i << (7 - exponent) & 0x7f);
    t.small_lower[i] = static_cast<uint8_t>(bits & 0xff), t.small_upper[i] = static_cast<uint8_t>(bits >> 8);
  }
  return t;
}
alignas(64) constexpr E4m3Bytes kE4m3Bytes = e4m3_bytes();

NPU_INLINE Codes64 looked_up(const uint8_t (&table)[16], Codes64 index) {
  const __m512i everywhere = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return (Codes64)_mm512_shuffle_epi8(everywhere, (__m512i)index);
}

// Up to 64 codes, the rest zero.
NPU_INLINE __m512i load_e4m3(const uint8_t* p, int64_t n) {
  if (n >= kCodesAtATime) return load_raw<__m512i>(p);
  __m512i v = {};
  memcpy(&v, p, n);
  return v;
}

// Of each 128 bits the lower eight codes are in out[0], and the upper ones in out[1].
NPU_INLINE void widen_e4m3(__m512i (&out)[2], __m512i codes) {
  Codes64 lower = (Codes64)((Words32of)codes << 4) & 0xf0, upper = looked_up(kE4m3Bytes.upper, (Codes64)((Words32of)codes >> 4) & 0x0f);
  if (__builtin_expect(_mm512_testn_epi8_mask(codes, (__m512i)(Codes64{} + 0x78)) != 0, 0)) {  // some have no exponent: few weights
    const Codes64 c = (Codes64)codes, small = (Codes64)((c & 0x78) == 0);
    lower = (small & looked_up(kE4m3Bytes.small_lower, c & 7)) | (~small & lower);
    upper = (small & (looked_up(kE4m3Bytes.small_upper, c & 7) | (c & 0x80))) | (~small & upper);
  }
  out[0] = _mm512_unpacklo_epi8((__m512i)lower, (__m512i)upper);
  out[1] = _mm512_unpackhi_epi8((__m512i)lower, (__m512i)upper);
}

// The same in their order.
NPU_INLINE void widen_e4m3_in_order(__m512i (&out)[2], __m512i codes) {
  typedef int64_t Words8of __attribute__((vector_size(64)));
  const Words8of v = (Words8of)codes;
  widen_e4m3(out, (__m512i)__builtin_shufflevector(v, v, 0, 4, 1, 5, 2, 6, 3, 7));
}

#endif

}  // namespace
}  // namespace npu_ops
