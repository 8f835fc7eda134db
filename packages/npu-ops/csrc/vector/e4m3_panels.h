// Codes of e4m3 in panels (vector/panels.h), in the places of int8, as bf16 and as floats: exactly. NaN is not looked for.
#pragma once

#include "vector/e4m3_rows.h"
#include "vector/panel_bytes.h"

namespace npu_ops {
namespace {

struct E4m3Codes {
  static constexpr int64_t kUnit = Bytes::kUnit;
};

#if defined(NPU_AVX512_BF16)

// Both pairs of k of a unit's columns from 16 * j on, as bf16 by the table of their upper and lower bytes.
template <class Values>
NPU_INLINE void e4m3_columns(__m512bh (&pair)[2], const uint8_t* unit, int j, const Values& values) {
  typedef int64_t Words8 __attribute__((vector_size(64)));
  const Words8 words = load_raw<Words8>(unit + 64 * j);
  const __m512i codes = (__m512i)__builtin_shufflevector(words, words, 0, 2, 1, 3, 4, 6, 5, 7);  // a column's pairs beside each other, 64 bits apart
  const auto looked_up = [&](const uint8_t (&table)[128]) {
    return _mm512_permutex2var_epi8(load_raw<__m512i>(table), codes, load_raw<__m512i>(table + 64));
  };
  const __m512i lower = looked_up(values.lower), upper = (__m512i)((U)looked_up(values.upper) | ((U)codes & 0x80808080u));
  pair[0] = (__m512bh)_mm512_unpacklo_epi8(lower, upper), pair[1] = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
}

#endif

// The i-th of the four elements of k of a unit's W columns from W * j on, as floats: 2^-8 of their values, by way of halves.
NPU_INLINE F e4m3_floats(const uint8_t* unit, int i, int j) {
  typedef int16_t I16 __attribute__((vector_size(2 * W)));
  const uint8_t* eight = unit + j * W / 8 * 32 + i / 2 * 16;
#if defined(NPU_AVX512)
  const auto half = [&](int h) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(eight + h * 32)); };
  const U16 pairs = (U16)_mm256_set_m128i(half(1), half(0));
#else
  const U16 pairs = load_raw<U16>(eight);
#endif
  return widen_fp16((U16)((I16)(i % 2 ? pairs : pairs << 8) >> 1) & 0xbf80);
}

}  // namespace
}  // namespace npu_ops
