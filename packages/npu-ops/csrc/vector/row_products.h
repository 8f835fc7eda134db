// Products of a few packed rows by many weight rows as they are stored.
#pragma once

#include "dispatch/caches.h"
#include "vector/gemm.h"

namespace npu_ops {
namespace {

#if defined(NPU_AVX512_BF16)
constexpr int kProductBatch = 8;  // packed rows at a time, at most
#elif defined(NPU_AVX512)
constexpr int kProductBatch = 6;
#else
constexpr int kProductBatch = 4;
#endif
constexpr int64_t kProductRows = 192;     // weight rows whose sums are kept meanwhile
#if defined(__AVX2__) && !defined(NPU_AVX512)
constexpr int64_t kProductAhead = 512;    // bytes
#else
constexpr int64_t kProductAhead = 1024;
#endif

// Of the packed rows of a pass: L1 keeps them, or, where they meet so many products that L2 is fast enough, L2 does, since a weight row
// that is read in one pass comes from memory faster.
template <int M>
constexpr int64_t kProductBytes = kProductBatch == 8 && M > 4 ? 98304 : 24576;

// What lies so many bytes further in M packed rows' weight rows is fetched into L1, if anything: a processor of AMD's (measured on a Zen 5)
// forgets what it is to fetch while it has no buffer free, and so some lines of what was to come into L2 do not.
template <int M>
constexpr int64_t kProductNear = kProductBatch < 8 ? 0 : M > 4 ? 2048 : 1024;
// Where L1 is smaller (measured on a Zen 4), a single row meets weights sooner that come into L2.
template <int M>
NPU_INLINE int64_t product_near() {
  return M == 1 && kProductNear<M> && l1_bytes() < kLargeL1 ? 0 : kProductNear<M>;
}

// What to fetch into L2 meanwhile. All batches of packed rows by one group of weight rows: the group comes from memory with the first,
// as fast as that can; several, and one that takes longer than the memory, share in fetching the group that comes next.
struct Ahead {
  int64_t next = 0;  // bytes from a row to the next group's, 0: unknown
  int64_t batches = 1, batch = 0;
};

// Weight rows at a time beside M packed rows: their sums fill the registers.
template <int M>
constexpr int kProductStreams = kProductBatch == 4 ? (M > 2 ? 3 : 4) : M > 6 ? 3 : 4;

// Whether tiles of R weight rows hold these in registers and read the packed rows from the cache, where both come in one pass. The other
// way round packed rows that do not all fit in registers are read again for each weight row.
template <class T, int R>
constexpr bool kHeld = kProductBatch == 4 || (kProductBatch == 8 && R < 4 && __is_same(T, bf16));

// Batches that `size` packed rows are taken in. Three weight rows by eight packed ones are faster than twice four by four, but not if
// the weight rows are widened first: then six at most are.
template <class T>
NPU_INLINE int64_t product_batches(int64_t size) {
  return ceil_div(size, kProductBatch == 8 && !__is_same(T, bf16) ? 6 : kProductBatch);
}

// As row_dots, where the weight rows are fewer than the packed ones: they are what registers hold. Returns how far it came.
template <class T, int R, int M>
NPU_INLINE int64_t held_row_dots(F (&acc)[R][M], const T* const (&w)[R], const typename RowDot<T>::Packed* x, int64_t ldx, int64_t k, int64_t ahead) {
  using D = RowDot<T>;
  int64_t j = 0;
  for (; j + D::kStep <= k; j += D::kStep) {
    typename D::Vector v[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if (kProductBatch == 4 || ahead) __builtin_prefetch(reinterpret_cast<const char*>(w[r] + j) + ahead, 0, 2);
      if (kProductNear<M>) __builtin_prefetch(reinterpret_cast<const char*>(w[r] + j) + kProductNear<M>, 0, 3);
      v[r] = D::template part<0>(w[r] + j);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const typename D::Vector column = D::packed(x + m * ldx + j);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][m] = D::mac(acc[r][m], v[r], column);
    }
  }
  return j;
}

// R weight rows, k elements from w[r] on, by M packed rows. The sums so far lie in `sums`, R * M vectors, unless these are the first.
// Fetches what lies `ahead` bytes further in the weight rows (0: nothing). Not inlined: the loop needs all registers.
template <class T, int R, int M>
__attribute__((noinline)) void row_tile(float* sums, bool first, const T* const (&w)[R], const typename RowDot<T>::Packed* x, int64_t ldx,
                                        int64_t k, int64_t ahead, int64_t near) {
  int64_t done = 0;
#if defined(__AVX2__) && !defined(NPU_AVX512)
  if constexpr (__is_same(T, bf16) && R == 3) {
    done = k / RowDot<T>::kStep * RowDot<T>::kStep;
    if (done > 0) {
      bf16_tile<M>(sums, w, x, ldx, done, ahead, !first);
      if (done == k) return;
      first = false;
    }
  }
#endif
  F acc[R][M];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) acc[r][m] = first ? F{} : load(sums + (r * M + m) * W);
  if constexpr (R > 1 && R < M && RowDot<T>::kParts == 1 && kHeld<T, R>) done = held_row_dots<T, R, M>(acc, w, x, ldx, k, ahead);
  const T* rest[R];
  for (int r = 0; r < R; ++r) rest[r] = w[r] + done;
  row_dots<T, R, M>(acc, rest, x + done, ldx, k - done, ahead, near);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) store(sums + (r * M + m) * W, acc[r][m]);
}

// At most kProductRows weight rows by M packed rows. The rows are taken from R places at a time, each of which goes on where it was: the
// processor fetches such streams from memory early, faster than one stream and faster than rows that end soon.
template <class T, int M, class Row>
inline void rows_by_batch(float* out, int64_t ldo, const typename RowDot<T>::Packed* x, int64_t ldx, int64_t rows, const Row& row, int64_t k,
                          Ahead ahead) {
  constexpr int R = kProductStreams<M>;
  constexpr int64_t kStep = RowDot<T>::kStep, kElements = kProductBytes<M> / (M * static_cast<int64_t>(sizeof(typename RowDot<T>::Packed)));
  float sums[kProductRows * M * W];  // [per][R][M], then the rest: [M] each
  const int64_t per = rows / R, passes = M == 1 ? 1 : greater(1, ceil_div(k, kElements));
  const int64_t depth = greater(1, ceil_div(ceil_div(k, passes), kStep)) * kStep;
  const bool stream = ahead.batches == 1 && passes == 1 && M <= 4;
  const int64_t near = product_near<M>();
  for (int64_t from = 0; from == 0 || from < k; from += depth) {
    const int64_t left = lesser(depth, k - from);
    for (int64_t i = 0; i < per; ++i) {
      const T* w[R];
      for (int r = 0; r < R; ++r) w[r] = row(r * per + i) + from;
      const int64_t further = stream ? (near ? 0 : kProductAhead) : i % ahead.batches == ahead.batch ? ahead.next : 0;
      row_tile<T, R, M>(sums + i * R * M * W, from == 0, w, x + from, ldx, left, further, near);
    }
    for (int64_t i = R * per; i < rows; ++i) {
      const T* const w[1] = {row(i) + from};
      row_tile<T, 1, M>(sums + i * M * W, from == 0, w, x + from, ldx, left, 0, near);
    }
  }
  const auto reduce = [&](int64_t first, int64_t count, const float* from, int64_t step) {
    for (int64_t i = 0; i < count; i += 4)
      for (int m = 0; m < M; ++m) {
        F v[4] = {};
        const int64_t left = lesser(4, count - i);
        for (int64_t r = 0; r < left; ++r) v[r] = load(from + (i + r) * step + m * W);
        float four[4];
        store_sums(left == 4 ? out + m * ldo + first + i : four, v[0], v[1], v[2], v[3]);
        if (left < 4) memcpy(out + m * ldo + first + i, four, sizeof(float) * left);
      }
  };
  for (int r = 0; r < R; ++r) reduce(r * per, per, sums + r * M * W, R * M * W);
  reduce(R * per, rows - R * per, sums + R * per * M * W, M * W);
}

// sums[i][j] = packed row i times weight row j, for `size` packed rows (M at most); `row(j)` is a weight row's address. A sum's order
// does not depend on `size`.
template <class T, int M = kProductBatch, class Row>
inline void row_products(int64_t size, float* sums, int64_t lds, const typename RowDot<T>::Packed* x, int64_t ldx, int64_t rows, const Row& row,
                         int64_t k, Ahead ahead = {}) {
  if constexpr (M > 0) {
    if (size != M) return row_products<T, M - 1>(size, sums, lds, x, ldx, rows, row, k, ahead);
    for (int64_t j = 0; j < rows; j += kProductRows)
      rows_by_batch<T, M>(sums + j, lds, x, ldx, lesser(kProductRows, rows - j), [&](int64_t i) { return row(j + i); }, k, ahead);
  }
}

}  // namespace
}  // namespace npu_ops
