// Products of weight rows as they are stored by up to eight rows of x, or two or three times as many, on AVX512_BF16.
//
// Of a weight row four elements at a time go to all lanes, in pairs, where two lanes of each row of x wait for one pair each; or eight, where four
// lanes of each of four rows do, in half of the products. So a vector of x is read once for a tile of weight rows, and not all rows of x, which are
// more than registers and, often, L1 hold; and a sum ends with one addition, or two.
#pragma once

#include "dispatch/caches.h"
#include "vector/past_caches.h"

namespace npu_ops {
namespace {

#if defined(NPU_AVX512_BF16)

constexpr int64_t kEight = 8;
constexpr int kEightTile = 8;  // weight rows at a time, at most

// What is faster by the processor's first cache. One of 48 KiB (measured on a Zen 5) holds the next tile of weight rows beside this one and x. One of
// 32 KiB (Zen 4) would lose x by it: fetched into L2, weights come as fast as if they were only read, and the larger the tile, the better.
struct EightWay {
  bool near;  // whether the next tile comes into L1
  // Whether so many rows of x are multiplied sooner so than otherwise. A single one is not while the memory is busy.
  NPU_INLINE bool takes(int64_t rows) const {
    return near ? rows >= 5 && rows <= 15 : (rows >= 2 && rows <= 2 * kEight) || (rows > 20 && rows <= 3 * kEight);
  }
  NPU_INLINE int64_t tile(int64_t eights, int64_t k) const {
    constexpr int64_t kLong = 1536;  // elements; L1 would not hold two tiles of longer rows beside eight rows of x
    if (!near) return kEightTile;
    return eights > 1 ? 6 : k > kLong ? 3 : 4;  // twice eight rows L1 does not hold either way: the fewer times they are read, the better
  }
};
NPU_INLINE EightWay eight_way() { return {l1_bytes() >= kLargeL1}; }

// How a vector is shared by N rows of x: by eight, or where there are no more, by four. By two was slower than by four.
template <int N>
struct SharedBy {
  static constexpr int64_t kElements = 2 * W / N;  // of a row of x

  // Floats of N rows of x.
  static NPU_INLINE int64_t size(int64_t k) { return ceil_div(k, kElements) * W; }

  // A weight row's elements for all N.
  static NPU_INLINE __m512i spread(const bf16* at) {
    if constexpr (N == 4) return _mm512_broadcast_i32x4(load_raw<__m128i>(at));
    int64_t part;
    memcpy(&part, at, sizeof part);
    return _mm512_set1_epi64(part);
  }

  // The sums over each row's lanes, in as many lanes as there are rows: of a those, behind them of b those.
  static NPU_INLINE F sum(F a, F b) {
    deinterleave(a, b);
    F y = a + b;
    if constexpr (N == 4) {
      F same = y;
      deinterleave(y, same), y += same;
    }
    return y;
  }
};
// The number of rows that share a vector, of so many.
NPU_INLINE int shared_by(int64_t rows) { return rows > 4 ? 8 : 4; }

// Floats of so many rows of x, as pack_eights packs them.
NPU_INLINE int64_t eights_size(int64_t rows, int64_t k) { return rows > 4 ? ceil_div(rows, kEight) * SharedBy<8>::size(k) : SharedBy<4>::size(k); }

// N rows of N parts of equal size become N parts of N rows.
NPU_INLINE void turn_parts(__m512i (&v)[4]) {
  const __m512i even[] = {_mm512_shuffle_i64x2(v[0], v[1], 0x88), _mm512_shuffle_i64x2(v[2], v[3], 0x88)};
  const __m512i odd[] = {_mm512_shuffle_i64x2(v[0], v[1], 0xdd), _mm512_shuffle_i64x2(v[2], v[3], 0xdd)};
  v[0] = _mm512_shuffle_i64x2(even[0], even[1], 0x88), v[2] = _mm512_shuffle_i64x2(even[0], even[1], 0xdd);
  v[1] = _mm512_shuffle_i64x2(odd[0], odd[1], 0x88), v[3] = _mm512_shuffle_i64x2(odd[0], odd[1], 0xdd);
}
NPU_INLINE void turn_parts(__m512i (&v)[8]) {
  __m512i even[4], odd[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    even[i] = _mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]);
    odd[i] = _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]);
  }
  turn_parts(even), turn_parts(odd);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) v[2 * i] = even[i], v[2 * i + 1] = odd[i];
}

// [k / elements][N rows][elements]; rows past `rows` and what is past k are zero. `row(i)` gives a row's address.
template <int N, class To = PastCaches, class Row>
inline void pack_shared(float* packed, const Row& row, int64_t rows, int64_t k) {
  constexpr int64_t kElements = SharedBy<N>::kElements, kParts = N * kElements;
  int64_t whole = 0;
  for (; whole + kParts <= k; whole += kParts) {
    __m512i v[N];
#pragma GCC unroll 8
    for (int m = 0; m < N; ++m) v[m] = m < rows ? load_raw<__m512i>(row(m) + whole) : __m512i{};
    turn_parts(v);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) To::put(packed + (whole / kElements + i) * W, v[i]);
  }
  bf16* to = reinterpret_cast<bf16*>(packed);
  for (int64_t m = 0; m < N; ++m) {
    const bf16* from = m < rows ? row(m) : nullptr;
    for (int64_t j = whole; j < k; j += kElements) {
      bf16 part[kElements] = {};
      if (from) memcpy(part, from + j, sizeof(bf16) * lesser(kElements, k - j));
      memcpy(to + j * N + m * kElements, part, sizeof part);
    }
  }
}
// As few rows as share a vector, eight at most.
template <class Row>
inline void pack_eight(float* packed, const Row& row, int64_t rows, int64_t k) {
  return shared_by(rows) == 4 ? pack_shared<4>(packed, row, rows, k) : pack_shared<8>(packed, row, rows, k);
}

// SharedBy<N>'s elements of N rows, element(i) with a row in each of the first N lanes, as pack_shared has them.
template <int N, class Element>
NPU_INLINE void put_shared(bf16* to, const Element& element) {
  constexpr int64_t kElements = SharedBy<N>::kElements;
  struct Order {
    alignas(64) uint16_t of[2 * W];
    constexpr Order() : of() {
      for (int i = 0; i < 2 * W; ++i) of[i] = static_cast<uint16_t>(i % kElements * N + i / kElements);
    }
  };
  static constexpr Order order;
  alignas(64) float by_element[2 * W + W];
#pragma GCC unroll 16
  for (int i = 0; i < kElements; ++i) store(by_element + i * N, element(i));
  const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh((__m512)load(by_element + W), (__m512)load(by_element));
  const __m512i line = _mm512_permutexvar_epi16(load_raw<__m512i>(order.of), pairs);
  memcpy(to, &line, sizeof line);
}

// So many rows, eight after eight where they are more, for all threads.
template <class Row>
inline void pack_eights(float* packed, const Row& row, int64_t rows, int64_t k) {
  if (rows <= kEight) pack_eight(packed, row, rows, k);
  else
    for (int64_t m = 0; m < rows; m += kEight)
      pack_shared<8>(packed + m / kEight * SharedBy<8>::size(k), [&](int64_t i) { return row(m + i); }, lesser(kEight, rows - m), k);
  _mm_sfence();
}

// c[r][ldc], a row of x in each of the first S * N lanes, = R weight rows, `stride` elements apart, by S times N packed rows of x, of k elements.
// Meanwhile the rows of the tile at `next` come into L1, or L2, one whole row after the other: in an order of their own, not in that in which they
// are multiplied, memory gives them a fifth faster, on a Zen 5 with two cores as fast as if they were only read. A Zen 4's gives them 1 to 9 % faster
// still from four places of the tile in turn.
template <int S, int N, int R>
__attribute__((noinline)) void eight_tile(float* c, int64_t ldc, const bf16* w, int64_t stride, const float* x, int64_t k, const bf16* next,
                                          bool near) {
  using Shared = SharedBy<N>;
  constexpr int64_t kLine = 32;  // elements of a cache line
  constexpr int kTurns = S == 1 ? 2 : 1;  // one after the other: so few products would wait for those before them
  F acc[kTurns][S][R] = {};
  const int64_t size = Shared::size(k);
  const bf16 *rows[R], *end = next + k;
  for (int r = 0; r < R; ++r) rows[r] = w + r * stride;
  const auto step = [&](int turn, int64_t j, const auto& part_at) __attribute__((always_inline)) {
    __m512bh of_x[S];
#pragma GCC unroll 3
    for (int s = 0; s < S; ++s) of_x[s] = load_raw<__m512bh>(x + s * size + j / Shared::kElements * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512bh part = (__m512bh)part_at(rows[r] + j);
#pragma GCC unroll 3
      for (int s = 0; s < S; ++s) acc[turn][s][r] = (F)_mm512_dpbf16_ps((__m512)acc[turn][s][r], of_x[s], part);
    }
  };
  const auto whole = [](const bf16* at) __attribute__((always_inline)) { return Shared::spread(at); };
  const auto fetch = [&]<bool kNear>() __attribute__((always_inline)) {
    constexpr int kPlaces = kNear || R % 4 ? 1 : 4, kEach = R / kPlaces;
#pragma GCC unroll 4
    for (int place = 0; place < kPlaces; ++place)
#pragma GCC unroll 8
      for (int r = 0; r < kEach; ++r) __builtin_prefetch(next + place * kEach * stride + r * kLine, 0, kNear ? 3 : 2);
    next += kEach * kLine;
    if (next >= end) {
      end += stride;
      next = end - k;
    }
  };
  int64_t j = 0;
  for (; j + kLine <= k; j += kLine) {
    near ? fetch.template operator()<true>() : fetch.template operator()<false>();
#pragma GCC unroll 1
    for (int64_t i = j; i < j + kLine; i += kTurns * Shared::kElements) {
      step(0, i, whole);
      if constexpr (kTurns == 2) step(1, i + Shared::kElements, whole);
    }
  }
  for (; j + Shared::kElements <= k; j += Shared::kElements) step(0, j, whole);
  if (j < k)
    step(0, j, [left = k - j](const bf16* at) __attribute__((always_inline)) {
      bf16 part[Shared::kElements] = {};
      memcpy(part, at, sizeof(bf16) * left);
      return Shared::spread(part);
    });
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const F a = kTurns == 2 ? acc[0][0][r] + acc[kTurns - 1][0][r] : acc[0][0][r];
    store(c + r * ldc, Shared::sum(a, S > 1 ? acc[0][S > 1][r] : a));
    if constexpr (S > 2) store(c + r * ldc + W, Shared::sum(acc[0][2][r], acc[0][2][r]));
  }
}

template <int S, int N, int R = kEightTile>
inline void some_eight_rows(int64_t rows, float* c, int64_t ldc, const bf16* w, int64_t stride, const float* x, int64_t k, const bf16* next,
                            bool near) {
  if constexpr (R > 0) {
    if (rows == R) return eight_tile<S, N, R>(c, ldc, w, stride, x, k, next, near);
    some_eight_rows<S, N, R - 1>(rows, c, ldc, w, stride, x, k, next, near);
  }
}

template <int S, int N>
inline void shared_product(float* c, int64_t ldc, int64_t rows, const bf16* w, int64_t stride, const float* x, int64_t k, const bf16* next,
                           const EightWay& way) {
  const int64_t tile = way.tile(S, k);
  for (int64_t i = 0; i < rows; i += tile) {
    const bf16* then = i + tile < rows ? w + (i + tile) * stride : next;
    some_eight_rows<S, N>(lesser(tile, rows - i), c + i * ldc, ldc, w + i * stride, stride, x, k, then, way.near);
  }
}

// c[rows][ldc] = weight rows, `stride` elements apart, by m packed rows of x, three times eight at most. `next`: the weight rows that are multiplied
// after these.
inline void eight_product(float* c, int64_t ldc, int64_t rows, const bf16* w, int64_t stride, const float* x, int64_t m, int64_t k, const bf16* next,
                          const EightWay& way) {
  const auto few = shared_by(m) == 4 ? shared_product<1, 4> : shared_product<1, 8>;
  const auto product = m > 2 * kEight ? shared_product<3, 8> : m > kEight ? shared_product<2, 8> : few;
  product(c, ldc, rows, w, stride, x, k, next, way);
}

#endif

}  // namespace
}  // namespace npu_ops
