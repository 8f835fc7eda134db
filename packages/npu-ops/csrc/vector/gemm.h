// Matrix products in float on registers: blocks of C += A * B, and sums of products of rows.
#pragma once

#include "vector/vec.h"

namespace npu_ops {
namespace {

// ---- C[m, 2W] = (or +=) A[m, k] * B[k, 2W]; A row-major in float, B a packed panel ----
#if defined(__AVX512F__)
constexpr int kRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kRows = 6;  // 12 of 16
#else
constexpr int kRows = 3;  // vectors are pairs of registers here
#endif
constexpr int kPanel = 2 * W;

template <int M>
NPU_INLINE void panel_rows(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t k, bool add) {
  F acc[M][2];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    acc[i][0] = add ? load(c + i * ldc) : F{};
    acc[i][1] = add ? load(c + i * ldc + W) : F{};
  }
  for (int64_t j = 0; j < k; ++j) {
    F b0 = load(b + j * kPanel), b1 = load(b + j * kPanel + W);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      F x = set1(a[i * lda + j]);
      acc[i][0] = fma(x, b0, acc[i][0]);
      acc[i][1] = fma(x, b1, acc[i][1]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    store(c + i * ldc, acc[i][0]);
    store(c + i * ldc + W, acc[i][1]);
  }
}

template <int M>
NPU_INLINE void panel_tail(int64_t m, float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t k, bool add) {
  if constexpr (M > 0) {
    if (m == M) return panel_rows<M>(c, ldc, a, lda, b, k, add);
    panel_tail<M - 1>(m, c, ldc, a, lda, b, k, add);
  }
}

inline void panel_product(int64_t m, float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t k, bool add) {
  int64_t i = 0;
  for (; i + kRows <= m; i += kRows) panel_rows<kRows>(c + i * ldc, ldc, a + i * lda, lda, b, k, add);
  panel_tail<kRows - 1>(m - i, c + i * ldc, ldc, a + i * lda, lda, b, k, add);
}

// Packs up to 2W rows of k elements into a panel [k][2W]; rows past n read as zero. `row(i)` gives a row's address.
template <class T, class Row>
NPU_INLINE void pack_panel_transposed(float* panel, const Row& row, int64_t n, int64_t k) {
  for (int64_t h = 0; h < 2; ++h) {
    const int64_t n0 = h * W;
    if (n0 >= n) {
      for (int64_t j = 0; j < k; ++j) store(panel + j * kPanel + n0, F{});
      continue;
    }
    const T* p[W];
    for (int64_t i = 0; i < W; ++i) p[i] = row(lesser(n0 + i, n - 1));
    for (int64_t j = 0; j < k; j += W) {
      const int64_t left = k - j;
      F r[W];
      for (int i = 0; i < W; ++i) r[i] = n0 + i < n ? load_n(p[i] + j, left) : F{};
      transpose(r);
      for (int i = 0; i < W && i < left; ++i) store(panel + (j + i) * kPanel + n0, r[i]);
    }
  }
}

// ---- sums of products along rows: out[r][m] = sum_k w[r][k] * x[m][k]; the rows w as stored, x packed once ----
//
// RowDot<T>::Packed  element of the packed x;  kStep  elements of a row read at a time
// bf16: two values share a 32-bit lane; a shift gives the even ones, a mask the odd ones as floats, and x is packed in that order.
template <class T>
struct RowDot {
  using Packed = float;
  static constexpr int kStep = W;
  struct Row {
    F v;
  };
  static NPU_INLINE Row row(const T* w) { return {load(w)}; }
  static NPU_INLINE F mac(F acc, Row w, const Packed* x) { return fma(w.v, load(x), acc); }
  static NPU_INLINE void pack(Packed* out, const T* x, int64_t n) { store(out, load_n(x, n)); }
};

#if defined(__AVX512BF16__)
template <>
struct RowDot<bf16> {
  using Packed = bf16;
  static constexpr int kStep = 2 * W;
  struct Row {
    __m512bh v;
  };
  static NPU_INLINE Row row(const bf16* w) { return {(__m512bh)_mm512_loadu_si512(w)}; }
  static NPU_INLINE F mac(F acc, Row w, const Packed* x) {
    return (F)_mm512_dpbf16_ps((__m512)acc, w.v, (__m512bh)_mm512_loadu_si512(x));
  }
  static NPU_INLINE void pack(Packed* out, const bf16* x, int64_t n) {
    for (int64_t i = 0; i < kStep; ++i) out[i] = i < n ? x[i] : bf16{0};
  }
};
#else
template <>
struct RowDot<bf16> {
  using Packed = float;
  static constexpr int kStep = 2 * W;
  struct Row {
    F even, odd;
  };
  static NPU_INLINE Row row(const bf16* w) {
    U u = load_raw<U>(w);
    return {from_bits(u << 16), from_bits(u & 0xffff0000u)};
  }
  static NPU_INLINE F mac(F acc, Row w, const Packed* x) { return fma(w.odd, load(x + W), fma(w.even, load(x), acc)); }
  static NPU_INLINE void pack(Packed* out, const bf16* x, int64_t n) {
    bf16 tmp[kStep] = {};
    for (int64_t i = 0; i < kStep && i < n; ++i) tmp[i] = x[i];
    Row r = row(tmp);
    store(out, r.even);
    store(out + W, r.odd);
  }
};
#endif

// Elements of the packed x for rows of k elements.
template <class T>
NPU_INLINE int64_t packed_length(int64_t k) {
  return ceil_div(k, RowDot<T>::kStep) * RowDot<T>::kStep;
}
template <class T>
inline void pack_row(typename RowDot<T>::Packed* out, const T* x, int64_t k) {
  constexpr int S = RowDot<T>::kStep;
  for (int64_t j = 0; j < k; j += S) RowDot<T>::pack(out + j, x + j, k - j);
}

// R rows of w by M packed rows of x (ldx apart). `ahead`: distance in bytes of the prefetch, 0 for none.
template <class T, int R, int M>
NPU_INLINE void row_dots(F (&acc)[R][M], const T* const (&w)[R], const typename RowDot<T>::Packed* x, int64_t ldx, int64_t k, int64_t ahead) {
  using D = RowDot<T>;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) acc[r][m] = F{};
  int64_t j = 0;
  for (; j + D::kStep <= k; j += D::kStep) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if (ahead) __builtin_prefetch(reinterpret_cast<const char*>(w[r] + j) + ahead);
      typename D::Row row = D::row(w[r] + j);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[r][m] = D::mac(acc[r][m], row, x + m * ldx + j);
    }
  }
  if (j < k)
    for (int r = 0; r < R; ++r) {
      T tmp[D::kStep] = {};
      for (int64_t i = 0; i < k - j; ++i) tmp[i] = w[r][j + i];
      typename D::Row row = D::row(tmp);
      for (int m = 0; m < M; ++m) acc[r][m] = D::mac(acc[r][m], row, x + m * ldx + j);
    }
}

}  // namespace
}  // namespace npu_ops
