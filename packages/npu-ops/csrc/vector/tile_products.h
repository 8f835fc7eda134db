// What products of bf16 rows on AMX tiles load: weight rows as they are stored, which need no packing, and packed rows of x.
//
// A tile of A is 16 weight rows by 32 elements of k, read from where they lie; one of B is the same elements of 16 rows of x, of which
// pairs are packed beforehand ([k / 2][row of x][2]); their product has a row for each weight row, and is turned when it is stored.
// So the larger matrix, the weights, goes from memory into the tiles, and only the smaller is packed. A sum runs along k in
// one order whatever the number of rows: batch-invariant mode may use this.
#pragma once

#include "vector/strips.h"
#include "vector/tiles.h"

namespace npu_ops {
namespace {

// So few rows of x are as fast as the memory without tiles.
constexpr int64_t kTooFewForTiles = 4;

// 16 weight rows, or fewer.
struct TileRows {
  const bf16* data;
  int64_t stride;  // elements from a row to the next
  int64_t rows;
};

NPU_INLINE TileRows rows_for_tiles(const bf16* data, int64_t stride, int64_t rows) {
  return {data, stride, lesser(kTileSide, greater(0, rows))};
}

// Row i of tiles of A that lie one after the other, [groups of 16 rows][packed_tiles(k)].
template <class E>
NPU_INLINE void row_of_tiles(E* tiles, int64_t i, const E* x, int64_t k) {
  E* to = tiles + i / kTileSide * packed_tiles<E>(k) + i % kTileSide * kTileDepthOf<E>;
  for (int64_t j = 0; j < k; j += kTileDepthOf<E>) {
    const F v = load_depth(x + j, k - j);
    memcpy(to + j * kTileSide, &v, sizeof v);
  }
}

// Weight rows copied so that tiles of A lie one after the other: read 64 bytes at a time from rows far apart, they would meet in few
// sets of the cache.
inline void copy_rows(bf16* to, const TileRows& w, int64_t k) {
  for (int64_t i = 0; i < w.rows; ++i) row_of_tiles(to, i, w.data + i * w.stride, k);
  for (int64_t i = w.rows; i < kTileSide; ++i)
    for (int64_t j = 0; j < k; j += kTileDepth) memset(to + j * kTileSide + i * kTileDepth, 0, sizeof(F));
}

// The rows' elements from k on into tile T; `left` of them are left.
template <int T>
NPU_INLINE void load_rows(const TileRows& w, int64_t k, int64_t left) {
  const bf16* from = w.data + k;
  if (w.rows == kTileSide && left >= kTileDepth) return tile_load<T>(from, w.stride * static_cast<int64_t>(sizeof(bf16)));
  F edge[kTileSide] = {};
  for (int64_t i = 0; i < w.rows; ++i) edge[i] = load_depth(from + i * w.stride, left);
  tile_load<T>(edge, sizeof(F));
}

}  // namespace
}  // namespace npu_ops
