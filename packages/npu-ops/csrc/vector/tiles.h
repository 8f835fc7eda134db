// The eight matrix tiles of AMX, each of 16 rows of 64 bytes. Where the compiler's target has none they are emulated in memory:
// that is slow, and there so that the tests can run the tile kernels on every machine.
#pragma once

#include "vector/vec.h"

namespace npu_ops {
namespace {

#if defined(__AMX_BF16__)

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Once a task, not once a block: loading a configuration costs about as much as thirty products.
inline void tiles_begin() {
  TileConfig config;
  // GCC 12 believes that only eight bytes of the configuration are read, and drops the other stores
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}
NPU_INLINE void tiles_end() { _tile_release(); }

// The intrinsics are macros over literal tile numbers.
template <int I>
NPU_INLINE void tile_zero() {
  if constexpr (I == 0) _tile_zero(0);
  if constexpr (I == 1) _tile_zero(1);
  if constexpr (I == 2) _tile_zero(2);
  if constexpr (I == 3) _tile_zero(3);
}
template <int I>
NPU_INLINE void tile_load(const void* p, int64_t stride) {
  __asm__ volatile("" ::: "memory");  // GCC 12 declares no memory input
  if constexpr (I == 0) _tile_loadd(0, p, stride);
  if constexpr (I == 1) _tile_loadd(1, p, stride);
  if constexpr (I == 2) _tile_loadd(2, p, stride);
  if constexpr (I == 3) _tile_loadd(3, p, stride);
  if constexpr (I == 4) _tile_loadd(4, p, stride);
  if constexpr (I == 5) _tile_loadd(5, p, stride);
  if constexpr (I == 6) _tile_loadd(6, p, stride);
  if constexpr (I == 7) _tile_loadd(7, p, stride);
}
template <int I>
NPU_INLINE void tile_store(void* p, int64_t stride) {
  if constexpr (I == 0) _tile_stored(0, p, stride);
  if constexpr (I == 1) _tile_stored(1, p, stride);
  if constexpr (I == 2) _tile_stored(2, p, stride);
  if constexpr (I == 3) _tile_stored(3, p, stride);
  __asm__ volatile("" ::: "memory");
}
// C[16, 16] += A[16, 32] * B[32, 16]; B holds pairs of its rows side by side
template <int C, int A, int B>
NPU_INLINE void tile_product() {
  if constexpr (C == 0 && A == 4 && B == 6) _tile_dpbf16ps(0, 4, 6);
  if constexpr (C == 1 && A == 4 && B == 7) _tile_dpbf16ps(1, 4, 7);
  if constexpr (C == 2 && A == 5 && B == 6) _tile_dpbf16ps(2, 5, 6);
  if constexpr (C == 3 && A == 5 && B == 7) _tile_dpbf16ps(3, 5, 7);
}

#else

struct Tile {
  alignas(64) unsigned char bytes[1024];
};
inline Tile* emulated_tiles() {
  return static_cast<Tile*>(thread_scratch(kCallerSlots - 1, 8 * sizeof(Tile)));
}
NPU_INLINE void tiles_begin() {}
NPU_INLINE void tiles_end() {}
template <int I>
inline void tile_zero() {
  memset(emulated_tiles()[I].bytes, 0, 1024);
}
template <int I>
inline void tile_load(const void* p, int64_t stride) {
  for (int r = 0; r < 16; ++r) memcpy(emulated_tiles()[I].bytes + 64 * r, static_cast<const char*>(p) + r * stride, 64);
}
template <int I>
inline void tile_store(void* p, int64_t stride) {
  for (int r = 0; r < 16; ++r) memcpy(static_cast<char*>(p) + r * stride, emulated_tiles()[I].bytes + 64 * r, 64);
}
template <int C, int A, int B>
inline void tile_product() {
  Tile* tiles = emulated_tiles();
  float c[16][16];
  bf16 a[16][32], b[16][32];
  memcpy(c, tiles[C].bytes, 1024);
  memcpy(a, tiles[A].bytes, 1024);
  memcpy(b, tiles[B].bytes, 1024);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j)
      for (int k = 0; k < 32; ++k) c[i][j] += to_float(a[i][k]) * to_float(b[k / 2][2 * j + k % 2]);
  memcpy(tiles[C].bytes, c, 1024);
}

#endif

}  // namespace
}  // namespace npu_ops
