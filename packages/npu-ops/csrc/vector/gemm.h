// Matrix products in float on registers: blocks of C += A * B, and sums of products of rows.
#pragma once

#include "vector/bf16_rows.h"
#include "vector/codes.h"

namespace npu_ops {
namespace {

// ---- C[m, 2W] = (or +=) A[m, k] * B[k, 2W]; A row-major in float, B a packed panel ----
#if defined(NPU_AVX512)
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

// Up to M rows.
template <int M>
NPU_INLINE void some_panel_rows(int64_t m, float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t k, bool add) {
  if constexpr (M > 0) {
    if (m == M) return panel_rows<M>(c, ldc, a, lda, b, k, add);
    some_panel_rows<M - 1>(m, c, ldc, a, lda, b, k, add);
  }
}

struct Nothing {
  NPU_INLINE void operator()() const {}
};

// `between` is called after each group of rows; the groups are of about equal size, for a small one is as slow as a large one.
template <class Between = Nothing>
inline void panel_product(int64_t m, float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t k, bool add,
                          const Between& between = {}) {
  const int64_t groups = ceil_div(m, kRows);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t i = g * m / groups;
    some_panel_rows<kRows>((g + 1) * m / groups - i, c + i * ldc, ldc, a + i * lda, lda, b, k, add);
    between();
  }
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
    int64_t j = 0;
    if constexpr (__is_same(T, bf16)) {  // two values share a lane until they are where they belong
      for (; j + 2 * W <= k && n0 + W <= n; j += 2 * W) {
        F r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) r[i] = load_raw<F>(p[i] + j);
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
          store(panel + (j + 2 * i) * kPanel + n0, from_bits(bits_of(r[i]) << 16));
          store(panel + (j + 2 * i + 1) * kPanel + n0, from_bits(bits_of(r[i]) & 0xffff0000u));
        }
      }
    }
    for (; j < k; j += W) {
      const int64_t left = k - j;
      F r[W];
      if (left >= W && n0 + W <= n) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) r[i] = load(p[i] + j);
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(panel + (j + i) * kPanel + n0, r[i]);
        continue;
      }
      for (int i = 0; i < W; ++i) r[i] = n0 + i < n ? load_n(p[i] + j, left) : F{};
      transpose(r);
      for (int i = 0; i < W && i < left; ++i) store(panel + (j + i) * kPanel + n0, r[i]);
    }
  }
}

// ---- sums of products along rows: out[r][m] = sum_k w[r][k] * x[m][k]; the rows w as stored, x packed once ----
//
// RowDot<T>: Packed, the element of the packed x; kStep, elements of a row read at a time, in kParts vectors; kLanes, elements of
// the packed x that meet one vector.
// The sums of codes are to be multiplied by kDrop<T>.
// bf16: two values share a 32-bit lane; a shift gives the even ones, a mask the odd ones as floats, and x is packed in that order.
template <class T>
struct RowDot {
  using Packed = float;
  using Vector = F;
  static constexpr int kStep = W, kParts = 1, kLanes = W;
  template <int Part>
  static NPU_INLINE Vector part(const T* w) {
    return load_small(w);
  }
  static NPU_INLINE Vector packed(const Packed* x) { return load(x); }
  static NPU_INLINE F mac(F acc, Vector w, Vector x) { return fma(w, x, acc); }
  template <class X>
  static NPU_INLINE void pack(Packed* out, const X* x, int64_t n) {
    store(out, load_n(x, n) * set1(kLift<T>));
  }
};

#if defined(NPU_AVX512_BF16)
template <>
struct RowDot<bf16> {
  using Packed = bf16;
  using Vector = __m512bh;
  static constexpr int kStep = 2 * W, kParts = 1, kLanes = 2 * W;
  template <int Part>
  static NPU_INLINE Vector part(const bf16* w) {
    return (__m512bh)_mm512_loadu_si512(w);
  }
  static NPU_INLINE Vector packed(const Packed* x) { return (__m512bh)_mm512_loadu_si512(x); }
  static NPU_INLINE F mac(F acc, Vector w, Vector x) { return (F)_mm512_dpbf16_ps((__m512)acc, w, x); }
  static NPU_INLINE void pack(Packed* out, const bf16* x, int64_t n) {
    for (int64_t i = 0; i < kStep; ++i) out[i] = i < n ? x[i] : bf16{0};
  }
};
#else
template <>
struct RowDot<bf16> {
  using Packed = float;
  using Vector = F;
  static constexpr int kStep = 2 * W, kParts = 2, kLanes = W;
  template <int Part>
  static NPU_INLINE Vector part(const bf16* w) {
    U u = load_raw<U>(w);
    return from_bits(Part ? u & 0xffff0000u : u << 16);
  }
  static NPU_INLINE Vector packed(const Packed* x) { return load(x); }
  static NPU_INLINE F mac(F acc, Vector w, Vector x) { return fma(w, x, acc); }
  static NPU_INLINE void pack(Packed* out, const bf16* x, int64_t n) {
    if (n >= kStep) {
      store(out, part<0>(x));
      store(out + W, part<1>(x));
      return;
    }
    bf16 tmp[kStep] = {};
    for (int64_t i = 0; i < kStep && i < n; ++i) tmp[i] = x[i];
    store(out, part<0>(tmp));
    store(out + W, part<1>(tmp));
  }
};
#endif

// Elements from a packed row of k elements to the next. Rows a power of two apart would share a few sets of the cache.
template <class T>
NPU_INLINE int64_t packed_length(int64_t k) {
  const int64_t length = ceil_div(k, RowDot<T>::kStep) * RowDot<T>::kStep;
  return length % 512 ? length : length + 32;
}
template <class T, class X>
inline void pack_row(typename RowDot<T>::Packed* out, const X* x, int64_t k) {
  constexpr int S = RowDot<T>::kStep;
  for (int64_t j = 0; j < k; j += S) RowDot<T>::pack(out + j, x + j, k - j);
}

template <class T, int R, int M, int Part>
NPU_INLINE void row_parts(F (&acc)[R][M], const T* const (&w)[R], int64_t j, const typename RowDot<T>::Packed* x, int64_t ldx, int64_t ahead,
                          int64_t near = 0) {
  using D = RowDot<T>;
  if constexpr (Part < D::kParts) {
    typename D::Vector v[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) v[m] = D::packed(x + m * ldx + Part * D::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if (Part == 0 && ahead) __builtin_prefetch(reinterpret_cast<const char*>(w[r] + j) + ahead, 0, 2);
      if (Part == 0 && near) __builtin_prefetch(reinterpret_cast<const char*>(w[r] + j) + near, 0, 3);
      typename D::Vector row = D::template part<Part>(w[r] + j);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[r][m] = D::mac(acc[r][m], row, v[m]);
    }
    row_parts<T, R, M, Part + 1>(acc, w, j, x, ldx, ahead, near);
  }
}

// Adds to acc the products of R rows of w, k elements from w[r] on, by M packed rows (ldx apart). What lies `ahead` bytes further is
// fetched into L2 meanwhile (0: nothing), and what lies `near` bytes further into L1.
template <class T, int R, int M>
NPU_INLINE void row_dots(F (&acc)[R][M], const T* const (&w)[R], const typename RowDot<T>::Packed* x, int64_t ldx, int64_t k, int64_t ahead,
                         int64_t near = 0) {
  constexpr int S = RowDot<T>::kStep;
  int64_t j = 0;
#if defined(__AVX2__) && !defined(NPU_AVX512)
  if constexpr (__is_same(T, bf16) && R == 4 && M == 3)
    if (k >= S) {
      j = k / S * S;
      bf16_row_products(acc, w, {x, x + ldx, x + 2 * ldx}, j, ahead ? ahead - 2 * j : 0);
    }
#endif
  if (ahead)
    for (; j + S <= k; j += S) row_parts<T, R, M, 0>(acc, w, j, x + j, ldx, ahead, near);
  else
    for (; j + S <= k; j += S) row_parts<T, R, M, 0>(acc, w, j, x + j, ldx, 0, near);
  if (j == k) return;
  T tail[R][S] = {};
  const T* rows[R];
  for (int r = 0; r < R; ++r) {
    for (int64_t i = 0; i < k - j; ++i) tail[r][i] = w[r][j + i];
    rows[r] = tail[r];
  }
  row_parts<T, R, M, 0>(acc, rows, 0, x + j, ldx, 0);
}

// out[0..4) = the sums of four vectors
NPU_INLINE void store_sums(float* out, F a, F b, F c, F d) {
#if defined(NPU_AVX512)
  const auto half = [](F x) { return _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1)); };
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(half(a), half(b)), _mm256_hadd_ps(half(c), half(d)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#elif defined(__AVX2__)
  __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

#if defined(NPU_AVX512)
// Of each four lanes of a and b the sums of neighbours, a's and then b's.
NPU_INLINE F sums_of_pairs(F a, F b) {
  return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// to[m * ld + r] = the sum of v[r][m], added up in the order of store_sums, with two thirds of its shuffles.
NPU_INLINE void store_sixteen_sums(float* to, int64_t ld, const F (&v)[4][4]) {
  const auto halves = [](F a, F b) __attribute__((always_inline)) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  };
  const auto two = [&](int m) __attribute__((always_inline)) {
    return sums_of_pairs(sums_of_pairs(halves(v[0][m], v[0][m + 1]), halves(v[1][m], v[1][m + 1])),
                         sums_of_pairs(halves(v[2][m], v[2][m + 1]), halves(v[3][m], v[3][m + 1])));
  };
  const F a = two(0), b = two(2);
  const F sums = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                 __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#pragma GCC unroll 4
  for (int m = 0; m < 4; ++m) memcpy(to + m * ld, reinterpret_cast<const float*>(&sums) + 4 * m, sizeof(float) * 4);
}
#endif

}  // namespace
}  // namespace npu_ops
