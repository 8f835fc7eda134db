// Products of a few packed rows by many weight rows as they are stored.
#pragma once

#include "vector/gemm.h"

namespace npu_ops {
namespace {

constexpr int64_t kProductDepth = 1024;  // elements of the packed rows that a pass keeps in L1
constexpr int64_t kProductRows = 16;     // weight rows of a pass

// R weight rows from j on, elements [from, from + depth), by M packed rows. The sums so far lie in `parts`, unless these are the first;
// the last are stored.
template <class T, int M, int R, class Row>
NPU_INLINE void some_row_products(float* sums, int64_t lds, const typename RowDot<T>::Packed* x, int64_t ldx, int64_t j, const Row& row,
                                  int64_t from, int64_t depth, bool last, float* parts, int64_t ahead) {
  const T* w[R];
  for (int r = 0; r < R; ++r) w[r] = row(j + r) + from;
  F acc[R][M];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) acc[r][m] = from > 0 ? load(parts + (r * M + m) * W) : F{};
  row_dots<T, R, M>(acc, w, x + from, ldx, depth, ahead);
  if (!last) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) store(parts + (r * M + m) * W, acc[r][m]);
    return;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    if constexpr (R % 4 == 0)
      for (int r = 0; r < R; r += 4) store_sums(sums + m * lds + j + r, acc[r][m], acc[r + 1][m], acc[r + 2][m], acc[r + 3][m]);
    else
      for (int r = 0; r < R; ++r) sums[m * lds + j + r] = sum(acc[r][m]);
  }
}

// sums[i][j] = packed row i times weight row j, for `size` packed rows (M at most); `row(j)` is a weight row's address. `ahead`: bytes
// from a row to what is read after these, 0: unknown. A sum's order does not depend on `size`.
template <class T, int M, class Row>
inline void row_products(int64_t size, float* sums, int64_t lds, const typename RowDot<T>::Packed* x, int64_t ldx, int64_t rows, const Row& row,
                         int64_t k, int64_t ahead) {
  if constexpr (M > 0) {
    if (size != M) return row_products<T, M - 1>(size, sums, lds, x, ldx, rows, row, k, ahead);
    constexpr int R = M == 1 ? 8 : 4;  // so many that a row alone keeps the memory busy
    const int64_t step = M == 1 ? greater(1, k) : kProductDepth;
    float parts[kProductRows * M * W];
    for (int64_t first = 0; first < rows; first += kProductRows) {
      const int64_t end = lesser(rows, first + kProductRows);
      for (int64_t from = 0; from < greater(1, k); from += step) {
        const int64_t depth = lesser(step, k - from);
        const bool last = from + step >= k;
        int64_t j = first;
        const auto some = [&]<int N>() {
          some_row_products<T, M, N>(sums, lds, x, ldx, j, row, from, depth, last, parts + (j - first) * M * W, ahead);
          j += N;
        };
        while (j + R <= end) some.template operator()<R>();
        if constexpr (R > 4)
          if (j + 4 <= end) some.template operator()<4>();
        while (j < end) some.template operator()<1>();
      }
    }
  }
}

}  // namespace
}  // namespace npu_ops
