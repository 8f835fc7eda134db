// Codes of MXFP4 in panels (vector/panels.h) times their groups' scales, as tiles of bf16, which holds such products exactly.
#pragma once

#include "vector/panel_bytes.h"
#include "vector/strips.h"

namespace npu_ops {
namespace {

// A code's value as bf16, times 2^(kLifted - 127): a scale of 2^(s - 127) then takes kLifted - s off the exponent, and saturation keeps zero.
constexpr int kLifted = 252;
struct LiftedCodes {
  uint16_t of[32];  // twice: the fifth bit of a place is another code's
};
constexpr LiftedCodes lifted_codes() {
  LiftedCodes t{};
  for (int i = 0; i < 32; ++i) {
    const int twice = kCodes[i % 16] - kCodesZero, size = twice < 0 ? -twice : twice;
    const int exponent = size < 2 ? -1 : size < 4 ? 0 : size < 8 ? 1 : 2;
    if (size) t.of[i] = static_cast<uint16_t>((twice < 0) << 15 | (kLifted + exponent) << 7 | (size << 7 >> (exponent + 1) & 0x7f));
  }
  return t;
}
alignas(64) constexpr LiftedCodes kLiftedCodes = lifted_codes();

// What 16 columns' scales take off the exponents of their pairs. Scales are kept where no number would leave bf16.
NPU_INLINE __m512i taken_off(const uint8_t* scales) {
  const U of = (U)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales))) & 0xffu;
  const U least = of < 2u ? U{} + 2u : of, kept = least > static_cast<uint32_t>(kLifted) ? U{} + static_cast<uint32_t>(kLifted) : least;
  const U off = (static_cast<uint32_t>(kLifted) - kept) << 7;
  return (__m512i)(off | off << 16);
}

// `units` of a panel, at most 8, as a tile a 16 columns; zero behind them. scales: the 32 columns'.
NPU_INLINE void mxfp4_tiles(bf16* const (&to)[kUnitRows], const uint8_t* from, int64_t units, const uint8_t* scales) {
  typedef int64_t Quarters __attribute__((vector_size(32)));
  const __m512i values = load_raw<__m512i>(kLiftedCodes.of), off[kUnitRows] = {taken_off(scales), taken_off(scales + 16)};
  for (int64_t u = 0; u < units; ++u, from += Codes::kUnit) {
    __builtin_prefetch(from + 4096);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const Quarters half = load_raw<Quarters>(from + pair * 32);
      const Words32 words = (Words32)__builtin_shufflevector(half, half, 0, 1, 2, 3, 0, 1, 2, 3);
#pragma GCC unroll 2
      for (int j = 0; j < kUnitRows; ++j) {
        const __m512i lifted = _mm512_permutexvar_epi16((__m512i)(words >> load_raw<Words32>(kNibbleShifts.of[j])), values);
        const __m512i v = _mm512_subs_epu16(lifted, off[j]);
        memcpy(to[j] + (2 * u + pair) * kTileDepth, &v, sizeof v);
      }
    }
  }
  for (int64_t u = units; u < kTileDepth / 4; ++u)
    for (int j = 0; j < kUnitRows; ++j) memset(to[j] + 2 * u * kTileDepth, 0, sizeof(bf16) * 2 * kTileDepth);
}

}  // namespace
}  // namespace npu_ops
