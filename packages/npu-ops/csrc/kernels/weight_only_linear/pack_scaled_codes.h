// Codes in panels (vector/panels.h) times their groups' scales, as tiles of bf16, exactly.
#pragma once

#include "vector/scaled_codes.h"
#include "vector/strips.h"

namespace npu_ops {
namespace {

// `units` of a panel, at most 8, as a tile a 16 columns; zero behind them. scales: their groups', of 32 columns each.
template <class Scales>
NPU_INLINE void pack_scaled_codes(bf16* const (&to)[kUnitRows], const uint8_t* from, int64_t units, const uint8_t* scales) {
  for (int64_t u = 0; u < units; scales += kColumns) {
    const Scales group = Scales::of(scales);
    for (const int64_t end = lesser(units, u + Scales::kUnits); u < end; ++u, from += Scales::Source::kUnit) {
#pragma GCC unroll 2
      for (int64_t line = 0; line < Scales::Source::kUnit; line += 64) __builtin_prefetch(from + 4096 + line);
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair)
#pragma GCC unroll 2
        for (int j = 0; j < kUnitRows; ++j) {
          const __m512bh v = group.columns(from, pair, j);
          memcpy(to[j] + (2 * u + pair) * kTileDepth, &v, sizeof v);
        }
    }
  }
  for (int64_t u = units; u < kTileDepth / 4; ++u)
    for (int j = 0; j < kUnitRows; ++j) memset(to[j] + 2 * u * kTileDepth, 0, sizeof(bf16) * 2 * kTileDepth);
}

}  // namespace
}  // namespace npu_ops
