// The eight tile registers of AMX, 16 rows of 64 bytes each: configuration, loads and stores, products. Tile numbers are constants.
//
// Where the tier is emulated (NPU_EMULATE_TIERS) the same functions work on an array, after the operations that Intel documents.
#pragma once

#include "vector/vec.h"

namespace npu_ops {
namespace {

constexpr int kTileBytes = 1024;

#if defined(NPU_EMULATED)

struct EmulatedTiles {
  bool configured;
  alignas(64) uint8_t of[8][kTileBytes];
};
inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}
inline uint8_t* emulated_tile(int i) {
  EmulatedTiles& tiles = emulated_tiles();
  if (!tiles.configured) __builtin_trap();  // as the processor would
  return tiles.of[i];
}

NPU_INLINE void configure_tiles() {
  memset(emulated_tiles().of, 0, sizeof(EmulatedTiles::of));
  emulated_tiles().configured = true;
}
NPU_INLINE void release_tiles() { emulated_tiles().configured = false; }

template <int T>
NPU_INLINE void tile_zero() {
  memset(emulated_tile(T), 0, kTileBytes);
}
template <int T>
NPU_INLINE void tile_load(const void* p, int64_t stride) {
  uint8_t* tile = emulated_tile(T);
  for (int r = 0; r < 16; ++r) memcpy(tile + r * 64, static_cast<const uint8_t*>(p) + r * stride, 64);
}
template <int T>
NPU_INLINE void tile_stream(const void* p, int64_t stride) {
  tile_load<T>(p, stride);
}
template <int T>
NPU_INLINE void tile_store(void* p, int64_t stride) {
  const uint8_t* tile = emulated_tile(T);
  for (int r = 0; r < 16; ++r) memcpy(static_cast<uint8_t*>(p) + r * stride, tile + r * 64, 64);
}

// TDPBF16PS: the sums of the even and of the odd elements, joined at the end. Denormals count as zero, here by MXCSR.
__attribute__((noinline)) void emulated_dp_bf16(uint8_t* c, const uint8_t* a, const uint8_t* b) {
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // no exceptions, round to nearest even, flush and read denormals as zero
  asm volatile("" ::: "memory");
  for (int m = 0; m < 16; ++m) {
    F even = {}, odd = {};
    for (int k = 0; k < 16; ++k) {
      uint32_t pair;
      memcpy(&pair, a + m * 64 + k * 4, 4);
      const U u = load_raw<U>(b + k * 64);
      even = fma(from_bits((pair << 16) - U{}), from_bits(u << 16), even);
      odd = fma(from_bits((pair & 0xffff0000u) - U{}), from_bits(u & 0xffff0000u), odd);
    }
    F row = load_raw<F>(c + m * 64) + (even + odd);
    memcpy(c + m * 64, &row, sizeof row);
  }
  asm volatile("" ::: "memory");
  _mm_setcsr(mode);
}

// TDPBSSD and its like: four products of bytes a lane, exact in 32 bits.
template <class X, class Y>
inline void emulated_dp_int8(uint8_t* c, const uint8_t* a, const uint8_t* b) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      uint32_t sum;
      memcpy(&sum, c + m * 64 + n * 4, 4);
      for (int k = 0; k < 16; ++k)
        for (int i = 0; i < 4; ++i)
          sum += static_cast<uint32_t>(static_cast<int32_t>(static_cast<X>(a[m * 64 + k * 4 + i])) * static_cast<int32_t>(static_cast<Y>(b[k * 64 + n * 4 + i])));
      memcpy(c + m * 64 + n * 4, &sum, 4);
    }
}

template <int C, int A, int B>
NPU_INLINE void tile_dp_bf16() {
  emulated_dp_bf16(emulated_tile(C), emulated_tile(A), emulated_tile(B));
}
template <int C, int A, int B>
NPU_INLINE void tile_dp_int8() {
  emulated_dp_int8<int8_t, int8_t>(emulated_tile(C), emulated_tile(A), emulated_tile(B));
}
template <int C, int A, int B>
NPU_INLINE void tile_dp_uint8() {
  emulated_dp_int8<uint8_t, int8_t>(emulated_tile(C), emulated_tile(A), emulated_tile(B));
}

#else

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
constexpr TileConfig kWholeTiles = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// The instructions are written out, with what they read and write in memory: GCC 12 knows too little of its own functions for these,
// and leaves out stores before them.
NPU_INLINE void configure_tiles() { asm volatile("ldtilecfg %0" ::"m"(kWholeTiles)); }
NPU_INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int T>
NPU_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
NPU_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
// As tile_load, of what L1 need not keep.
template <int T>
NPU_INLINE void tile_stream(const void* p, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
NPU_INLINE void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
NPU_INLINE void tile_dp_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
NPU_INLINE void tile_dp_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// A without signs
template <int C, int A, int B>
NPU_INLINE void tile_dp_uint8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

// The products of elements E: of bf16, or of bytes with signs.
template <class E, int C, int A, int B>
NPU_INLINE void tile_dp() {
  if constexpr (__is_same(E, bf16)) tile_dp_bf16<C, A, B>();
  else tile_dp_int8<C, A, B>();
}

// The thread's tiles while a kernel's body uses them. They are released behind it: the tiles belong to nobody in between, and others
// (oneDNN) configure their own.
struct Tiles {
  NPU_INLINE Tiles() { configure_tiles(); }
  NPU_INLINE ~Tiles() { release_tiles(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace npu_ops
