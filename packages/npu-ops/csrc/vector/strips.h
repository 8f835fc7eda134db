// Weights of bf16, or of bytes, packed shortly before they meet many rows of x: strips of 16 columns, which are tiles of AMX one after the
// other, or the lanes of vectors: [k / 2][16 columns][2] of bf16, zero up to whole tiles.
//
// Some columns' weights are a type with
//   columns, pairs()
//   pack(to, pair, from, depth): a pair's strips, packed_tiles(depth) apart, of the elements from `from` on, a multiple of a tile's depth
//   fetch(pair, from, depth): what fetches the same into L2: `lines` in all, some whenever it is called
#pragma once

#include "vector/past_caches.h"

namespace npu_ops {
namespace {

template <class E>
constexpr int64_t kTileDepthOf = 64 / sizeof(E);  // elements of k in a tile
constexpr int64_t kTileDepth = kTileDepthOf<bf16>;
constexpr int64_t kTileSide = 16;              // rows of a tile, columns of a strip
constexpr int64_t kBlockSide = 2 * kTileSide;  // columns of a pair of strips

// Rows of x as they are stored, `stride` elements apart.
struct PlainRows {
  const bf16* data;
  int64_t stride;
};

// Elements from a prepared row of x to the next: no power of two, or rows would share a few sets of the cache.
NPU_INLINE int64_t plain_stride(int64_t k) { return ceil_div(k, kTileDepth) * kTileDepth + kTileDepth; }

// Elements that a strip takes, or 16 rows of x as tiles.
template <class E = bf16>
NPU_INLINE int64_t packed_tiles(int64_t k) {
  return ceil_div(k, kTileDepthOf<E>) * kTileDepthOf<E> * kTileSide;
}

// Lines that are fetched into L2, some whenever it is called.
struct FetchLines {
  const uint8_t* at;
  int64_t lines;

  NPU_INLINE void operator()(int64_t count) {
    for (; count > 0 && lines > 0; --count, --lines, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// The weight rows of `columns` columns of the result: one each, or a gate's and an up's.
struct WeightBlock {
  const bf16* side[2];
  int64_t sides;
  int64_t stride;  // elements from a row to the next
  int64_t columns;
};

#if defined(NPU_AVX512_BF16)
// Up to a tile's depth of elements, the rest zero.
template <class E>
NPU_INLINE F load_depth(const E* p, int64_t n) {
  if (n >= kTileDepthOf<E>) return load_raw<F>(p);
  F v = {};
  memcpy(&v, p, sizeof(E) * n);
  return v;
}

// Up to 16 rows of x, `row(i)` their addresses, as a strip.
template <class To = IntoCache, class Row>
inline void pack_strip(bf16* out, const Row& row, int64_t rows, int64_t k) {
  for (int64_t j = 0; j < k; j += kTileDepth) {
    F r[kTileSide];
    for (int64_t i = 0; i < kTileSide; ++i) r[i] = i < rows ? load_depth(row(i) + j, k - j) : F{};
    transpose(r);
    for (int64_t i = 0; i < kTileSide; ++i) To::put(out + j * kTileSide + i * kTileDepth, (__m512i)r[i]);
  }
}

// One line of a row of the result.
NPU_INLINE void put_line(bf16* to, F low, F high, bool stream) {
  const __m512i line = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  if (stream) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
  else memcpy(to, &line, sizeof line);
}
#endif

}  // namespace
}  // namespace npu_ops
