// Products of matrices that lie row by row in the arrays of a program: c[M][N] += a[M][K] * b[K][N].
#pragma once

#include "types.h"

namespace npu_triton {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRows = 8;  // of a tile: with two vectors a row, 16 accumulators of 32 registers
#else
constexpr int kVectorBytes = 32;
constexpr int kRows = 4;  // 8 of 16
#endif

template <class T, int Rows, int Vectors, int N, int K>
NPU_INLINE void dot_tile(T* __restrict c, const T* __restrict a, const T* __restrict b) {
  typedef T Vector __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
  constexpr int lanes = kVectorBytes / int(sizeof(T));
  Vector sums[Rows][Vectors];
  for (int i = 0; i < Rows; i++)
    for (int j = 0; j < Vectors; j++) sums[i][j] = *reinterpret_cast<const Vector*>(c + i * N + j * lanes);
  for (int k = 0; k < K; k++) {
    Vector row[Vectors];
    for (int j = 0; j < Vectors; j++) row[j] = *reinterpret_cast<const Vector*>(b + k * N + j * lanes);
    for (int i = 0; i < Rows; i++)
      for (int j = 0; j < Vectors; j++) sums[i][j] += a[i * K + k] * row[j];
  }
  for (int i = 0; i < Rows; i++)
    for (int j = 0; j < Vectors; j++) *reinterpret_cast<Vector*>(c + i * N + j * lanes) = sums[i][j];
}

template <int M, int N, int K, class T>
NPU_INLINE void dot_by_tiles(T* __restrict c, const T* __restrict a, const T* __restrict b) {
  constexpr int lanes = kVectorBytes / int(sizeof(T)), rows = M < kRows ? M : kRows;
  constexpr int vectors = N >= 2 * lanes ? 2 : 1;
  for (int j = 0; j < N; j += vectors * lanes)
    for (int i = 0; i < M; i += rows) dot_tile<T, rows, vectors, N, K>(c + i * N + j, a + i * K, b + j);
}

template <int M, int N, int K, class C, class A, class B>
NPU_INLINE void dot_by_loops(C* __restrict c, const A* __restrict a, const B* __restrict b) {
  for (int i = 0; i < M; i++)
    for (int k = 0; k < K; k++) {
      const C left = C(a[i * K + k]);
      for (int j = 0; j < N; j++) c[i * N + j] += left * C(b[k * N + j]);
    }
}

// Not inlined: a kernel with several products of a size has the code once.
template <int M, int N, int K>
__attribute__((noinline)) static void dot(float* __restrict c, const float* __restrict a, const float* __restrict b) {
  if constexpr (N * sizeof(float) >= kVectorBytes) dot_by_tiles<M, N, K>(c, a, b);
  else dot_by_loops<M, N, K>(c, a, b);
}
template <int M, int N, int K>
__attribute__((noinline)) static void dot(double* __restrict c, const double* __restrict a, const double* __restrict b) {
  if constexpr (N * sizeof(double) >= kVectorBytes) dot_by_tiles<M, N, K>(c, a, b);
  else dot_by_loops<M, N, K>(c, a, b);
}
template <int M, int N, int K>
__attribute__((noinline)) static void dot(int32_t* __restrict c, const int8_t* __restrict a, const int8_t* __restrict b) {
  dot_by_loops<M, N, K>(c, a, b);
}

}  // namespace npu_triton

#if defined(__AVX512BF16__) && defined(NPU_DOT_OF_BF16)
#include <immintrin.h>

namespace npu_triton {

// One instruction adds the products of two neighbours in k: b is interleaved by pairs of rows first.
template <int M, int N, int K>
__attribute__((noinline)) static void dot(float* __restrict c, const bf16* __restrict a, const bf16* __restrict b) {
  static_assert(N % 16 == 0 && K % 2 == 0, "the code generator takes floats otherwise");
  alignas(64) uint32_t pairs[K / 2 * N];
  for (int k = 0; k < K; k += 2)
    for (int j = 0; j < N; j++) pairs[k / 2 * N + j] = uint32_t(b[k * N + j].raw) | uint32_t(b[(k + 1) * N + j].raw) << 16;
  constexpr int rows = M < 8 ? M : 8, vectors = N >= 32 ? 2 : 1;
  for (int j = 0; j < N; j += vectors * 16)
    for (int i = 0; i < M; i += rows) {
      __m512 sums[rows][vectors];
      for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_loadu_ps(c + (i + r) * N + j + v * 16);
      for (int k = 0; k < K / 2; k++) {
        __m512i row[vectors];
        for (int v = 0; v < vectors; v++) row[v] = _mm512_load_si512(pairs + k * N + j + v * 16);
        for (int r = 0; r < rows; r++) {
          int32_t pair;
          __builtin_memcpy(&pair, a + (i + r) * K + 2 * k, sizeof(pair));
          const __m512bh left = (__m512bh)(_mm512_set1_epi32(pair));
          for (int v = 0; v < vectors; v++)
            sums[r][v] = _mm512_dpbf16_ps(sums[r][v], left, (__m512bh)(row[v]));
        }
      }
      for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(c + (i + r) * N + j + v * 16, sums[r][v]);
    }
}

}  // namespace npu_triton
#elif defined(NPU_DOT_OF_BF16)
namespace npu_triton {

template <int M, int N, int K>
__attribute__((noinline)) static void dot(float* __restrict c, const bf16* __restrict a, const bf16* __restrict b) {
  alignas(64) float left[M * K], right[K * N];
  for (int i = 0; i < M * K; i++) left[i] = float(a[i]);
  for (int i = 0; i < K * N; i++) right[i] = float(b[i]);
  dot<M, N, K>(c, static_cast<const float*>(left), static_cast<const float*>(right));
}

}  // namespace npu_triton
#endif
