// Products of codes in panels (vector/panels.h) by rows of bf16 on AVX512_BF16: times their scales (vector/scaled_codes.h), so that sums know no groups.
#pragma once

#include "vector/code_products.h"
#include "vector/scaled_codes.h"

namespace npu_ops {
namespace {

#if defined(NPU_AVX512_BF16)

// Some k of P panels: their codes, and their groups' scales of 32 columns each.
template <int P>
struct ScaledCodes {
  const uint8_t *codes, *scales;
  int64_t codes_apart, scales_apart;  // bytes from a panel to the next one
  int64_t units;
};

// y[P][M][kColumns], `ldy` from a panel to the next, += P panels by M rows of x, times `factor`. In one order for all M and P.
template <class Scales, int M, int P>
__attribute__((noinline)) void scaled_code_tile(float* y, int64_t ldy, const ScaledCodes<P>& w, const PlainRows& x, const F (&factor)[P][kSums]) {
  const bf16* rows[(M + 2) / 3];  // each third one: the others are once and twice the stride from it
#pragma GCC unroll 4
  for (int m = 0; m < (M + 2) / 3; ++m) rows[m] = x.data + 3 * m * x.stride;
  F acc[P][M][kSums] = {};
  constexpr int64_t kUnit = Scales::Source::kUnit;
  const uint8_t *codes = w.codes, *of_group = w.scales, *const last = codes + w.units * kUnit;
  while (codes < last) {
    Scales scales[P];
#pragma GCC unroll 2
    for (int i = 0; i < P; ++i) scales[i] = Scales::of(of_group + i * w.scales_apart);
    of_group += kColumns;
    const uint8_t* const stop = codes + Scales::kUnits * kUnit;
    const uint8_t* const end = stop < last ? stop : last;
#pragma GCC unroll 1
    for (; codes < end; codes += kUnit) {
#pragma GCC unroll 2
      for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
        for (int64_t line = 0; line < kUnit; line += 64) __builtin_prefetch(codes + i * w.codes_apart + kAheadUnits * kUnit + line);
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        __m512bh columns[P][kSums];
#pragma GCC unroll 2
        for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
          for (int j = 0; j < kSums; ++j) columns[i][j] = scales[i].columns(codes + i * w.codes_apart, pair, j);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          int32_t elements;
          memcpy(&elements, rows[m / 3] + m % 3 * x.stride + 2 * pair, sizeof elements);
          const __m512bh of_x = (__m512bh)(elements - I{});
#pragma GCC unroll 2
          for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
            for (int j = 0; j < kSums; ++j) acc[i][m][j] = (F)_mm512_dpbf16_ps((__m512)acc[i][m][j], columns[i][j], of_x);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < (M + 2) / 3; ++m) rows[m] += 4;
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < P; ++i)
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < kSums; ++j) {
        float* to = y + i * ldy + m * kColumns + j * W;
        store(to, fma(acc[i][m][j], factor[i][j], load(to)));
      }
}

template <class Scales, int M, int P>
inline void scaled_code_tile_of(int64_t rows, float* y, int64_t ldy, const ScaledCodes<P>& w, const PlainRows& x, const F (&factor)[P][kSums]) {
  if constexpr (M > 0) {
    if (rows == M) return scaled_code_tile<Scales, M, P>(y, ldy, w, x, factor);
    scaled_code_tile_of<Scales, M - 1, P>(rows, y, ldy, w, x, factor);
  }
}

// y[P][m][kColumns] = P panels' codes by m rows of x, M of them at a time at most.
template <class Scales, int M, int P>
inline void scaled_code_tiles(float* y, ScaledCodes<P> w, const PlainRows& x, int64_t m, const F (&factor)[P][kSums]) {
  const int64_t tiles = ceil_div(m, M), ldy = m * kColumns, all = w.units;
  memset(y, 0, sizeof(float) * P * ldy);
  for (int64_t unit = 0; unit < all; unit += kCodeDepth / 4) {
    w.units = lesser(kCodeDepth / 4, all - unit);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = t * m / tiles;
      scaled_code_tile_of<Scales, M, P>((t + 1) * m / tiles - row, y + row * kColumns, ldy, w, {x.data + row * x.stride + 4 * unit, x.stride}, factor);
    }
    w.codes += kCodeDepth / 4 * Scales::Source::kUnit, w.scales += kCodeDepth / 4 / Scales::kUnits * kColumns;
  }
}

#endif

}  // namespace
}  // namespace npu_ops
