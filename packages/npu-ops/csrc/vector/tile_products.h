// Products of bf16 rows on AMX tiles: x by weight rows as they are stored, which need no packing.
//
// A tile of A is 16 weight rows by 32 elements of k, read from where they lie; one of B is the same elements of 16 rows of x, of which
// pairs are packed beforehand ([k / 2][row of x][2]); their product has a row for each weight row, and is turned when it is stored.
// So the larger matrix, the weights, goes from memory into the tiles, and only the smaller is packed. A sum runs along k in
// one order whatever the number of rows: batch-invariant mode may use this.
#pragma once

#include "vector/tiles.h"

namespace npu_ops {
namespace {

constexpr int64_t kTileDepth = 32;  // elements of k in a tile
constexpr int64_t kTileSide = 16;   // rows of a tile
// So few rows of x are as fast as the memory without tiles.
constexpr int64_t kTooFewForTiles = 4;

// 16 weight rows, or fewer.
struct TileRows {
  const bf16* data;
  int64_t stride;  // elements from a row to the next
  int64_t step;    // elements to the next kTileDepth of k: the same number, unless the rows are copied
  int64_t rows;
};

NPU_INLINE TileRows rows_for_tiles(const bf16* data, int64_t stride, int64_t rows) {
  return {data, stride, kTileDepth, lesser(kTileSide, greater(0, rows))};
}

// Up to kTileDepth elements, the rest zero.
NPU_INLINE F load_depth(const bf16* p, int64_t n) {
  if (n >= kTileDepth) return load_raw<F>(p);
  F v = {};
  memcpy(&v, p, sizeof(bf16) * n);
  return v;
}

// Elements that 16 rows of x take when packed.
NPU_INLINE int64_t packed_tiles(int64_t k) { return ceil_div(k, kTileDepth) * kTileDepth * kTileSide; }

// Packs up to 16 rows of x, `row(i)` their addresses.
template <class Row>
inline void pack_for_tiles(bf16* out, const Row& row, int64_t rows, int64_t k) {
  for (int64_t j = 0; j < k; j += kTileDepth) {
    F r[kTileSide];
    for (int64_t i = 0; i < kTileSide; ++i) r[i] = i < rows ? load_depth(row(i) + j, k - j) : F{};
    transpose(r);
    for (int64_t i = 0; i < kTileSide; ++i) memcpy(out + j * kTileSide + i * kTileDepth, &r[i], sizeof(F));
  }
}

// Weight rows copied so that tiles of A lie one after the other: read 64 bytes at a time from rows far apart, they would meet in few
// sets of the cache.
inline TileRows copied_rows(bf16* to, const TileRows& w, int64_t k) {
  for (int64_t i = 0; i < kTileSide; ++i)
    for (int64_t j = 0; j < k; j += kTileDepth) {
      const F v = i < w.rows ? load_depth(w.data + i * w.stride + j, k - j) : F{};
      memcpy(to + j * kTileSide + i * kTileDepth, &v, sizeof v);
    }
  return {to, kTileDepth, kTileDepth * kTileSide, kTileSide};
}

// Step `s` of the rows into tile T; `left` elements of k are left. What lies `ahead` elements further is fetched into L2 (0: nothing).
template <int T>
NPU_INLINE void load_rows(const TileRows& w, int64_t s, int64_t left, int64_t ahead) {
  const bf16* from = w.data + s * w.step;
  if (ahead)
    for (int64_t i = 0; i < kTileSide; ++i) __builtin_prefetch(from + i * w.stride + ahead, 0, 2);
  if (w.rows == kTileSide && (left >= kTileDepth || w.step != kTileDepth)) return tile_load<T>(from, w.stride * static_cast<int64_t>(sizeof(bf16)));
  F edge[kTileSide] = {};
  for (int64_t i = 0; i < w.rows; ++i) edge[i] = load_depth(from + i * w.stride, left);
  tile_load<T>(edge, sizeof(F));
}

// N times 16 weight rows by M times 16 rows of x: 4 by 1, or 2 by up to 2. Four tiles hold the sums: as many products are under way as it
// takes to hide how long one takes.
template <int N, int M, int n = 0>
NPU_INLINE void tile_step(const TileRows* w, int64_t s, int64_t left, int64_t ahead) {
  constexpr int kFirstB = M == 1 ? 0 : 2, kA = M == 1 ? 1 + n % 3 : n;
  if constexpr (n < N) {
    load_rows<kA>(w[n], s, left, ahead);
    tile_dp_bf16<4 + n * M, kA, kFirstB>();
    if constexpr (M == 2) tile_dp_bf16<4 + n * M + 1, kA, kFirstB + 1>();
    tile_step<N, M, n + 1>(w, s, left, ahead);
  }
}

// sums[N][M] of 16 by 16; groups of 16 rows of x are `ldx` elements apart.
template <int N, int M>
inline void tile_block(float* sums, const TileRows* w, const bf16* x, int64_t ldx, int64_t k, int64_t ahead) {
  static_assert(N * M <= 4 && M <= 2);
  constexpr int kFirstB = M == 1 ? 0 : 2;
  constexpr int64_t kTile = kTileSide * kTileSide, kRow = kTileSide * sizeof(float);
  tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
  for (int64_t s = 0; s * kTileDepth < k; ++s) {
    const bf16* b = x + s * kTileDepth * kTileSide;
    tile_load<kFirstB>(b, 64);
    if constexpr (M == 2) tile_load<kFirstB + 1>(b + ldx, 64);
    tile_step<N, M>(w, s, k - s * kTileDepth, ahead);
  }
  tile_store<4>(sums, kRow);
  if constexpr (N * M > 1) tile_store<5>(sums + kTile, kRow);
  if constexpr (N * M > 2) tile_store<6>(sums + 2 * kTile, kRow), tile_store<7>(sums + 3 * kTile, kRow);
}

}  // namespace
}  // namespace npu_ops
