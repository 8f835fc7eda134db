// Products of weight rows as they are stored by up to eight rows of x, or two or three times as many, on AVX512_BF16.
//
// Of a weight row four elements at a time go to all lanes, in pairs, where two lanes of each row of x wait for one pair each. So a vector of x is
// read once for a tile of weight rows, and not all rows of x, which are more than registers and, often, L1 hold; and a sum ends with one addition.
#pragma once

#include "dispatch/caches.h"
#include "vector/past_caches.h"

namespace npu_ops {
namespace {

#if defined(NPU_AVX512_BF16)

constexpr int64_t kEight = 8;
constexpr int kEightTile = 8;          // weight rows at a time, at most
constexpr int64_t kEightElements = 4;  // of a row of x in a vector

// What is faster by the processor's first cache. One of 48 KiB (measured on a Zen 5) holds the next tile of weight rows beside this one and x. One of
// 32 KiB (Zen 4) would lose x by it: fetched into L2, weights come as fast as if they were only read, and the larger the tile, the better.
struct EightWay {
  bool near;  // whether the next tile comes into L1
  // Whether so many rows of x are multiplied sooner so than otherwise.
  NPU_INLINE bool takes(int64_t rows) const {
    return near ? rows >= 5 && rows <= 15 : (rows >= 2 && rows <= 2 * kEight) || (rows > 20 && rows <= 3 * kEight);
  }
  NPU_INLINE int64_t tile(int64_t eights, int64_t k) const {
    constexpr int64_t kLong = 1536;  // elements; L1 would not hold two tiles of longer rows beside eight rows of x
    if (!near) return kEightTile;
    return eights > 1 ? 6 : k > kLong ? 3 : 4;  // twice eight rows L1 does not hold either way: the fewer times they are read, the better
  }
};
NPU_INLINE EightWay eight_way() { return {l1_bytes() >= 48 << 10}; }

// Floats of eight rows of x as eight_product takes them.
NPU_INLINE int64_t eight_size(int64_t k) { return ceil_div(k, kEightElements) * W; }
NPU_INLINE int64_t eights_size(int64_t rows, int64_t k) { return ceil_div(rows, kEight) * eight_size(k); }

// Eight rows of eight parts of four elements each become eight parts of eight rows.
NPU_INLINE void turn_parts(__m512i (&v)[kEight]) {
  __m512i pairs[kEight], fours[kEight];
#pragma GCC unroll 4
  for (int i = 0; i < kEight; i += 2) {
    pairs[i] = _mm512_unpacklo_epi64(v[i], v[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi64(v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd)
#pragma GCC unroll 2
    for (int i = 0; i < kEight; i += 4) {
      fours[i + odd] = _mm512_shuffle_i64x2(pairs[i + odd], pairs[i + odd + 2], 0x88);
      fours[i + odd + 2] = _mm512_shuffle_i64x2(pairs[i + odd], pairs[i + odd + 2], 0xdd);
    }
#pragma GCC unroll 4
  for (int i = 0; i < kEight / 2; ++i) {
    v[i] = _mm512_shuffle_i64x2(fours[i], fours[i + 4], 0x88);
    v[i + 4] = _mm512_shuffle_i64x2(fours[i], fours[i + 4], 0xdd);
  }
}

// [k / 4][8 rows][4]; rows past `rows` and what is past k are zero. `row(i)` gives a row's address.
template <class Row>
inline void pack_eight(float* packed, const Row& row, int64_t rows, int64_t k) {
  constexpr int64_t kParts = kEight * kEightElements;
  int64_t whole = 0;
  for (; whole + kParts <= k; whole += kParts) {
    __m512i v[kEight];
#pragma GCC unroll 8
    for (int m = 0; m < kEight; ++m) v[m] = m < rows ? load_raw<__m512i>(row(m) + whole) : __m512i{};
    turn_parts(v);
#pragma GCC unroll 8
    for (int i = 0; i < kEight; ++i) PastCaches::put(packed + (whole / kEightElements + i) * W, v[i]);
  }
  bf16* to = reinterpret_cast<bf16*>(packed);
  for (int64_t m = 0; m < kEight; ++m) {
    const bf16* from = m < rows ? row(m) : nullptr;
    for (int64_t j = whole; j < k; j += kEightElements) {
      bf16 part[kEightElements] = {};
      if (from) memcpy(part, from + j, sizeof(bf16) * lesser(kEightElements, k - j));
      memcpy(to + j * kEight + m * kEightElements, part, sizeof part);
    }
  }
}

// Four elements of eight rows, a row in each of the first eight lanes, as pack_eight has them.
NPU_INLINE void put_eight(bf16* to, const F (&elements)[kEightElements]) {
  alignas(64) static constexpr uint16_t kFours[] = {0, 16, 32, 48, 1, 17, 33, 49, 2, 18, 34, 50, 3, 19, 35, 51,
                                                    4, 20, 36, 52, 5, 21, 37, 53, 6, 22, 38, 54, 7, 23, 39, 55};
  const __m512i first = (__m512i)_mm512_cvtne2ps_pbh((__m512)elements[1], (__m512)elements[0]);
  const __m512i second = (__m512i)_mm512_cvtne2ps_pbh((__m512)elements[3], (__m512)elements[2]);
  const __m512i line = _mm512_permutex2var_epi16(first, load_raw<__m512i>(kFours), second);
  memcpy(to, &line, sizeof line);
}

// So many rows, eight after eight, for all threads.
template <class Row>
inline void pack_eights(float* packed, const Row& row, int64_t rows, int64_t k) {
  for (int64_t m = 0; m < rows; m += kEight)
    pack_eight(packed + m / kEight * eight_size(k), [&](int64_t i) { return row(m + i); }, lesser(kEight, rows - m), k);
  _mm_sfence();
}

// c[r][ldc], a row of x in each of the first S * 8 lanes, = R weight rows, `stride` elements apart, by S times eight packed rows of x, k elements of each.
// Meanwhile the rows of the tile at `next` come into L1, or L2, one whole row after the other: in an order of their own, not in that in which they
// are multiplied, memory gives them a fifth faster, on a Zen 5 with two cores as fast as if they were only read.
template <int S, int R>
__attribute__((noinline)) void eight_tile(float* c, int64_t ldc, const bf16* w, int64_t stride, const float* x, int64_t k, const bf16* next,
                                          bool near) {
  constexpr int64_t kLine = 32;  // elements of a cache line
  constexpr int kTurns = S == 1 ? 2 : 1;  // one after the other: so few products would wait for those before them
  F acc[kTurns][S][R] = {};
  const int64_t size = eight_size(k);
  const bf16 *rows[R], *end = next + k;
  for (int r = 0; r < R; ++r) rows[r] = w + r * stride;
  const auto step = [&](int turn, int64_t j, const auto& part_at) __attribute__((always_inline)) {
    __m512bh of_x[S];
#pragma GCC unroll 3
    for (int s = 0; s < S; ++s) of_x[s] = load_raw<__m512bh>(x + s * size + j * (W / kEightElements));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512bh part = (__m512bh)_mm512_set1_epi64(part_at(rows[r] + j));
#pragma GCC unroll 3
      for (int s = 0; s < S; ++s) acc[turn][s][r] = (F)_mm512_dpbf16_ps((__m512)acc[turn][s][r], of_x[s], part);
    }
  };
  const auto whole = [](const bf16* at) __attribute__((always_inline)) {
    int64_t part;
    memcpy(&part, at, sizeof part);
    return part;
  };
  int64_t j = 0;
  for (; j + kLine <= k; j += kLine) {
    if (near)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) __builtin_prefetch(next + r * kLine, 0, 3);
    else
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) __builtin_prefetch(next + r * kLine, 0, 2);
    next += R * kLine;
    if (next >= end) {
      end += stride;
      next = end - k;
    }
#pragma GCC unroll 1
    for (int64_t i = j; i < j + kLine; i += kTurns * kEightElements) {
      step(0, i, whole);
      if constexpr (kTurns == 2) step(1, i + kEightElements, whole);
    }
  }
  for (; j + kEightElements <= k; j += kEightElements) step(0, j, whole);
  if (j < k)
    step(0, j, [left = k - j](const bf16* at) __attribute__((always_inline)) {
      const int64_t second = left > 1 ? at[1].bits : 0, third = left > 2 ? at[2].bits : 0;
      return at[0].bits | second << 16 | third << 32;
    });
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    F a = kTurns == 2 ? acc[0][0][r] + acc[kTurns - 1][0][r] : acc[0][0][r], b = S > 1 ? acc[0][S > 1][r] : a;
    deinterleave(a, b);
    store(c + r * ldc, a + b);
    if constexpr (S > 2) {
      F last = acc[0][2][r], same = last;
      deinterleave(last, same);
      store(c + r * ldc + W, last + same);
    }
  }
}

template <int S, int R = kEightTile>
inline void some_eight_rows(int64_t rows, float* c, int64_t ldc, const bf16* w, int64_t stride, const float* x, int64_t k, const bf16* next,
                            bool near) {
  if constexpr (R > 0) {
    if (rows == R) return eight_tile<S, R>(c, ldc, w, stride, x, k, next, near);
    some_eight_rows<S, R - 1>(rows, c, ldc, w, stride, x, k, next, near);
  }
}

// c[rows][ldc] = weight rows, `stride` elements apart, by up to S times eight packed rows of x. `next`: the weight rows that are multiplied after these.
template <int S>
inline void eight_product(float* c, int64_t ldc, int64_t rows, const bf16* w, int64_t stride, const float* x, int64_t k, const bf16* next,
                          const EightWay& way) {
  const int64_t tile = way.tile(S, k);
  for (int64_t i = 0; i < rows; i += tile) {
    const bf16* then = i + tile < rows ? w + (i + tile) * stride : next;
    some_eight_rows<S>(lesser(tile, rows - i), c + i * ldc, ldc, w + i * stride, stride, x, k, then, way.near);
  }
}

#endif

}  // namespace
}  // namespace npu_ops
