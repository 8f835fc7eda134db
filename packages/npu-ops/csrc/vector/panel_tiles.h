// Panels of integer weights (vector/panels.h) as AMX tiles of bytes, 64 elements of k by 16 columns each, and 16-bit rows in a form that
// meets them.
//
// A 16-bit number is two bytes, the upper with its sign and the lower without one. Their products with the weights are summed apart,
// exactly; 256 times the one sum and the other are the sum that vector/panels.h has of the same numbers.
#pragma once

#include "vector/panel_bytes.h"
#include "vector/tiles.h"

namespace npu_ops {
namespace {

constexpr int64_t kByteDepth = 64;      // elements of k in a tile of bytes
constexpr int64_t kByteRows = 16;       // rows of x
constexpr int64_t kUnitsOfTile = 16;    // of 4 elements of k: rows of a tile of weights
constexpr int kPanelTiles = kUnitRows;

typedef int16_t Shorts32 __attribute__((vector_size(64)));
typedef int8_t Bytes32 __attribute__((vector_size(32)));

// ---- weights ----

// Where a panel's tiles lie: those of a step beside one another, or all of the same columns.
struct PlacesOfTiles {
  uint8_t* first;
  int64_t step = kPanelTiles * kTileBytes, columns = kTileBytes;  // bytes from a tile to the next
};

// `units` of a panel as tiles, zero behind the last unit. What lies `ahead` bytes further on is fetched meanwhile; 0: nothing.
template <class Source>
NPU_INLINE void units_to_tiles(const PlacesOfTiles& to, const uint8_t* from, int64_t units, int64_t steps, const Bytes64 (&zeros)[kPanelTiles],
                               int64_t ahead = 4096) {
  const auto row = [&](int64_t u, int j) { return to.first + u / kUnitsOfTile * to.step + j * to.columns + u % kUnitsOfTile * 64; };
  for (int64_t u = 0; u < units; ++u, from += Source::kUnit) {
    for (int64_t i = 0; ahead && i < Source::kUnit; i += 64) __builtin_prefetch(from + ahead + i);
    __m512i rows[kPanelTiles];
    unit_rows(rows, Source{}, from);
#pragma GCC unroll 2
    for (int j = 0; j < kPanelTiles; ++j) {
      const Bytes64 v = (Bytes64)rows[j] - zeros[j];
      memcpy(row(u, j), &v, sizeof v);
    }
  }
  for (int64_t u = units; u < steps * kUnitsOfTile; ++u)
    for (int j = 0; j < kPanelTiles; ++j) memset(row(u, j), 0, 64);
}

// ---- rows of x ----

// 16-bit numbers, a multiple of kByteDepth, become their upper and their lower bytes in turn, kByteDepth of each, in the same place.
NPU_INLINE void split_bytes(int16_t* values, int64_t n) {
  for (int64_t i = 0; i < n; i += kByteDepth) {
    const Shorts32 a = load_raw<Shorts32>(values + i), b = load_raw<Shorts32>(values + i + 32);
    const Bytes32 parts[4] = {__builtin_convertvector(a >> 8, Bytes32), __builtin_convertvector(b >> 8, Bytes32), __builtin_convertvector(a, Bytes32),
                              __builtin_convertvector(b, Bytes32)};
    memcpy(values + i, parts, sizeof parts);
  }
}

// ---- products ----

// sums[kPanelTiles][upper, lower][16 rows of x][16 columns]; x in split bytes, rows `ldx` bytes apart. Meanwhile `lines` lines from `fetch`
// on come into L2.
NPU_INLINE void split_products(int32_t* sums, const int16_t* x, int64_t ldx, const uint8_t* w, int64_t steps, const uint8_t* fetch, int64_t lines) {
  tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t i = s * lines / steps; i < (s + 1) * lines / steps; ++i) __builtin_prefetch(fetch + i * 64, 0, 2);
    tile_load<0>(x + s * kByteDepth, ldx);
    tile_load<2>(w + s * kPanelTiles * kTileBytes, 64);
    tile_dp_int8<4, 0, 2>();
    tile_load<1>(x + s * kByteDepth + kByteDepth / 2, ldx);
    tile_dp_uint8<5, 1, 2>();
    tile_load<3>(w + (s * kPanelTiles + 1) * kTileBytes, 64);
    tile_dp_int8<6, 0, 3>();
    tile_dp_uint8<7, 1, 3>();
  }
  tile_store<4>(sums, 64), tile_store<5>(sums + 256, 64), tile_store<6>(sums + 512, 64), tile_store<7>(sums + 768, 64);
}

// The sums of row i, 16 columns from 16 j on.
NPU_INLINE I split_sum(const int32_t* sums, int64_t i, int j) {
  return (I)((U)load_raw<I>(sums + j * 512 + i * 16) << 8) + load_raw<I>(sums + j * 512 + 256 + i * 16);
}

}  // namespace
}  // namespace npu_ops
