// Products of weight rows as they are stored by panels of x, on AVX512_BF16: the other way round than weight_panels.h.
//
// What is transposed is x, once a product, and not the weights: of a weight row two elements at a time meet up to two panels of 32 rows
// of x in all lanes. Nothing is left to add up along a vector; the result comes out with x's rows in the lanes, and is turned at the end.
#pragma once

#include "vector/weight_panels.h"

namespace npu_ops {
namespace {

// Whether more than few rows are multiplied so.
template <class T>
#if defined(NPU_AVX512_BF16)
constexpr bool kTurned = __is_same(T, bf16);
#else
constexpr bool kTurned = false;
#endif

// Of so many rows of x those that are left over, too few for lanes of their own: by row_products.h they take less time, a third longer
// each than a row of a full panel.
NPU_INLINE int64_t rows_left_over(int64_t rows) {
  constexpr int64_t kMost = 11;
  const int64_t rest = rows % (kPanel / 2);
  return rows > kPanel / 2 && rest <= kMost ? rest : 0;
}

// Whether so many rows of x are faster so than all of them by row_products.h. Up to 16 rows alone take as long as 20 of a full panel.
NPU_INLINE bool fill_panels(int64_t rows) {
  return rows > kPanel / 2 || 3 * 20 < 4 * rows;
}

#if defined(NPU_AVX512_BF16)

// Weight rows at a time: beside two panels their sums fill the registers. Twice as many beside one panel would, too, but where rows are
// a power of two long their lines meet in one set of L1, which holds eight.
constexpr int kTurnedRows = 6;
constexpr int64_t kTurnedPanels = 2;    // at a time
constexpr int64_t kTurnedAhead = 1024;  // bytes of a weight row that are on their way
constexpr int64_t kTurnedLine = 32;     // elements of a cache line

// Rows of x in the lanes of panels, `size` floats apart, that have so many vectors of them: [k / 2][vectors][lane][2].
template <int Vectors>
struct TurnedLanes {
  static constexpr int kVectors = Vectors;
  const float* data;
  int64_t size, count;

  // The pairs of the v-th vector for element j.
  NPU_INLINE const float* at(int v, int64_t j) const { return data + v / Vectors * size + j / 2 * (Vectors * W) + v % Vectors * W; }
};
using TurnedPanels = TurnedLanes<kPanel / W>;

// Row r of c, at c + r * ldc, = (or +=) one of R weight rows, `stride` elements apart, by the first V * W rows of x, k elements of each. Meanwhile what
// lies `ahead` bytes further in the weight rows is fetched into L2.
template <int R, int V, class Lanes>
__attribute__((noinline)) void turned_tile(float* c, int64_t ldc, const bf16* w, int64_t stride, const Lanes& x, int64_t k, bool add, int64_t ahead) {
  constexpr int kTurns = V == 1 ? 2 : 1;  // one after the other: six products alone would wait for those before them
  F acc[kTurns][R][V] = {};
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[0][r][v] = add ? load(c + r * ldc + v * W) : F{};
  const bf16* rows[(R + 2) / 3];  // each third one: the others are once and twice the stride from it
#pragma GCC unroll 2
  for (int r = 0; r < (R + 2) / 3; ++r) rows[r] = w + 3 * r * stride;
  const auto step = [&](int turn, int64_t j, auto pair_at) __attribute__((always_inline)) {
    __m512bh columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = load_raw<__m512bh>(x.at(v, j));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = (__m512bh)(pair_at(rows[r / 3] + r % 3 * stride + j) - I{});
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[turn][r][v] = (F)_mm512_dpbf16_ps((__m512)acc[turn][r][v], columns[v], pair);
    }
  };
  const auto both = [](const bf16* at) __attribute__((always_inline)) {
    int32_t pair;
    memcpy(&pair, at, sizeof pair);
    return pair;
  };
  int64_t j = 0;
  for (; j + kTurnedLine <= k; j += kTurnedLine) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      __builtin_prefetch(reinterpret_cast<const char*>(rows[r / 3] + r % 3 * stride + j) + ahead, 0, 2);
#pragma GCC unroll 1
    for (int64_t i = j; i < j + kTurnedLine; i += 2 * kTurns) {
      step(0, i, both);
      if constexpr (kTurns == 2) step(1, i + 2, both);
    }
  }
  for (; j + 2 <= k; j += 2) step(0, j, both);
  if (j < k) step(0, j, [](const bf16* at) __attribute__((always_inline)) { return static_cast<int32_t>(at->bits); });
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + r * ldc + v * W, kTurns == 2 ? acc[0][r][v] + acc[kTurns - 1][r][v] : acc[0][r][v]);
}

template <int V, int R = kTurnedRows, class Lanes>
inline void some_turned_rows(int64_t rows, float* c, int64_t ldc, const bf16* w, int64_t stride, const Lanes& x, int64_t k, bool add, int64_t ahead) {
  if constexpr (R > 0) {
    if (rows == R) return turned_tile<R, V>(c, ldc, w, stride, x, k, add, ahead);
    some_turned_rows<V, R - 1>(rows, c, ldc, w, stride, x, k, add, ahead);
  }
}

template <int V = kTurnedPanels * kPanel / W, class Lanes>
inline void turned_rows(int64_t rows, float* c, int64_t ldc, const bf16* w, int64_t stride, const Lanes& x, int64_t k, bool add, int64_t ahead) {
  if constexpr (V > 0) {
    if (x.count > (V - 1) * W) return some_turned_rows<V>(rows, c, ldc, w, stride, x, k, add, ahead);
    turned_rows<V - 1>(rows, c, ldc, w, stride, x, k, add, ahead);
  }
}

// c[rows][ldc] = (or +=) weight rows, `stride` elements apart, by the first rows of x, kTurnedPanels panels at most, k elements of each. The
// weight rows are taken from places far from one another, each of which goes on where it was: as streams of memory.
template <class Lanes>
inline void turned_product(float* c, int64_t ldc, int64_t rows, const bf16* w, int64_t stride, const Lanes& x, int64_t k, bool add,
                           int64_t ahead = kTurnedAhead) {
  const int64_t tiles = ceil_div(rows, kTurnedRows);
  for (int64_t t = 0; t < tiles; ++t)
    turned_rows((rows - t + tiles - 1) / tiles, c + t * ldc, tiles * ldc, w + t * stride, tiles * stride, x, k, add, ahead);
}

// y[W], one row of x each, of W weight rows: at(i) is where the sums of the i-th are, from the row's place on.
template <class At>
NPU_INLINE void turn_back(F (&y)[W], const At& at) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) y[i] = load(at(i));
  transpose(y);
}

// out[rows][ldo], 2W columns: lanes(i) has what belongs into column i, a row in each lane. Neighbours become one word, which is turned.
template <class Lanes>
NPU_INLINE void put_lanes(bf16* out, int64_t ldo, int64_t rows, const Lanes& lanes) {
  alignas(64) static constexpr uint16_t kNeighbours[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i neighbours = load_raw<__m512i>(kNeighbours);
  F y[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i)
    y[i] = (F)_mm512_permutexvar_epi16(neighbours, (__m512i)_mm512_cvtne2ps_pbh((__m512)lanes(2 * i + 1), (__m512)lanes(2 * i)));
  transpose(y);
  for (int64_t i = 0; i < rows; ++i) memcpy(out + i * ldo, &y[i], sizeof y[i]);
}

#endif

}  // namespace
}  // namespace npu_ops
