// Products of bf16 or of bytes on AMX tiles, for up to 32 rows of x: tiles of x by 32 columns' weights, which come from memory in another
// form and become tiles shortly before they are multiplied. A sum runs along k as in many_rows.h.
#pragma once

#include "vector/tile_products.h"

namespace npu_ops {
namespace {

constexpr int64_t kFewTileRows = 2 * kTileSide;
constexpr int kColumnTiles = 2;  // of 16 columns each

// The sums of a row of x and 16 columns of the 32: floats or, of bytes, integers.
struct FewRowsSums {
  alignas(64) float of[2][kColumnTiles][kTileSide][16];

  NPU_INLINE F row(int64_t m, int64_t j) const { return load(of[m / kTileSide][j][m % kTileSide]); }
};

// One group of 16 rows, or two, packed_tiles(k) apart. unpack(tiles, step): a step's tiles of weights, [kColumnTiles].
template <class E, bool kTwo, class Unpack>
NPU_INLINE void sums_of_few_rows(FewRowsSums& sums, const E* x, int64_t k, const Unpack& unpack) {
  constexpr int64_t kTile = kTileBytes / sizeof(E), kLag = 2, kRing = 4;  // steps from a store to its load, which then does not wait for it
  alignas(64) E ring[kRing][kColumnTiles][kTile];
  const int64_t steps = ceil_div(k, kTileDepthOf<E>), ldx = packed_tiles<E>(k);
  tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
  for (int64_t s = 0; s < steps + kLag; ++s) {
    if (s < steps) unpack(ring[s % kRing], s);
    if (s < kLag) continue;
    const auto& weights = ring[(s - kLag) % kRing];
    const E* rows = x + (s - kLag) * kTile;
    tile_load<0>(rows, 64);
    tile_load<2>(weights[0], 64);
    tile_dp<E, 4, 0, 2>();
    tile_load<3>(weights[1], 64);
    tile_dp<E, 5, 0, 3>();
    if constexpr (!kTwo) continue;
    tile_load<1>(rows + ldx, 64);
    tile_dp<E, 6, 1, 2>();
    tile_dp<E, 7, 1, 3>();
  }
  tile_store<4>(sums.of[0][0], 64), tile_store<5>(sums.of[0][1], 64);
  if constexpr (kTwo) tile_store<6>(sums.of[1][0], 64), tile_store<7>(sums.of[1][1], 64);
}
template <class E, class Unpack>
NPU_INLINE void sums_of_few_rows(FewRowsSums& sums, const E* x, int64_t rows, int64_t k, const Unpack& unpack) {
  if (rows > kTileSide) sums_of_few_rows<E, true>(sums, x, k, unpack);
  else sums_of_few_rows<E, false>(sums, x, k, unpack);
}

}  // namespace
}  // namespace npu_ops
