// Products of a few packed rows by many weight rows as they are stored.
#pragma once

#include "vector/gemm.h"

namespace npu_ops {
namespace {

// R weight rows from j on by M packed rows.
template <class T, int M, int R, class Row>
NPU_INLINE void some_row_products(float* sums, int64_t lds, const typename RowDot<T>::Packed* x, int64_t ldx, int64_t j, const Row& row, int64_t k,
                         int64_t ahead) {
  const T* w[R];
  for (int r = 0; r < R; ++r) w[r] = row(j + r);
  F acc[R][M] = {};
  row_dots<T, R, M>(acc, w, x, ldx, k, ahead);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    if constexpr (R == 4)
      store_sums(sums + m * lds + j, acc[0][m], acc[1][m], acc[2][m], acc[3][m]);
    else
      for (int r = 0; r < R; ++r) sums[m * lds + j + r] = sum(acc[r][m]);
  }
}

// sums[i][j] = packed row i times weight row j, for `size` packed rows (M at most); `row(j)` is a weight row's address. `ahead`: bytes
// from a row to what is read after these, 0: unknown.
template <class T, int M, class Row>
inline void row_products(int64_t size, float* sums, int64_t lds, const typename RowDot<T>::Packed* x, int64_t ldx, int64_t rows, const Row& row,
                       int64_t k, int64_t ahead) {
  if constexpr (M > 0) {
    if (size != M) return row_products<T, M - 1>(size, sums, lds, x, ldx, rows, row, k, ahead);
    int64_t j = 0;
    for (; j + 4 <= rows; j += 4) some_row_products<T, M, 4>(sums, lds, x, ldx, j, row, k, ahead);
    for (; j < rows; ++j) some_row_products<T, M, 1>(sums, lds, x, ldx, j, row, k, ahead);
  }
}

}  // namespace
}  // namespace npu_ops
