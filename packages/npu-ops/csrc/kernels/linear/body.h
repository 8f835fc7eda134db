// Products y = x w^T with what follows them, compiled once a tier.
//
// Few rows of x (decode): products along the weight rows, each read once from memory.
// More rows: weights are packed into panels in the cache, then blocks of the result are kept in registers; with products of bf16, x is.
// The first adds up a row in one order whatever the number of rows; batch-invariant mode knows no other.
//
// An Epilogue says what a column of the result is made of, and what becomes of it before it is written:
//   kSides: weight rows of a column: 1, or 2 (n columns of gates, then n of ups)
//   put(m, column, y, left), or put(m, column, gate, up, left): the vector of row m from `column` on; left: Whole or how many of it
//   value(...) of the same: what put writes; kReadsOut: whether it is made of what was there before
//   kInLanes: whether there is also in_lanes(column, y), or in_lanes(column, gate, up): what is written into `column`, a row in each lane
#pragma once

#include "dispatch/batch_invariance.h"
#include "kernels/linear/linear.h"
#include "vector/eight_rows.h"
#include "vector/parts.h"
#include "vector/row_products.h"
#include "vector/turned_products.h"
#include "vector/weight_panels.h"
#if defined(NPU_AMX)
#include "kernels/linear/tiles.inc"
#endif

namespace npu_ops::NPU_TIER {
namespace {

// Up to here products along rows.
template <class T>
#if defined(NPU_AVX512_BF16)
constexpr int64_t kFewRows = 12;
#elif defined(NPU_AVX512)
constexpr int64_t kFewRows = __is_same(T, bf16) ? 24 : 12;
#elif defined(__AVX2__)
constexpr int64_t kFewRows = __is_same(T, bf16) ? 32 : 18;  // shifts widen a weight row as fast as a packed panel
#else
constexpr int64_t kFewRows = 18;
#endif

// Rows of x at a time where there are more. Their floats are in the cache that the cores share, and in a core's own their results in a
// block of columns; but each part of the rows packs the weights anew.
constexpr int64_t kFloatBytes = 4 << 20, kLeastRows = 192, kMostFloatRows = 512;

constexpr int64_t kGroupRows = kProductRows;  // weight rows of a group, at most
#if defined(NPU_AVX512)
constexpr int64_t kGroupBytes = 400 << 10;  // of them; L2, here 1 MiB at least, holds the group, the next one, and the rows of x
#else
constexpr int64_t kGroupBytes = 128 << 10;  // L2 is 512 KiB at least
#endif
// Of a group that meets all rows of x at once, and need not stay in L2; elsewhere that was not measured.
#if defined(__AVX2__) && !defined(NPU_AVX512)
constexpr int64_t kPassingBytes = 512 << 10;
#else
constexpr int64_t kPassingBytes = kGroupBytes;
#endif

// Weight rows of a group of k elements each, where there are so many columns. The more of them, the longer are the streams of memory; but
// each thread gets several groups. `most`: bytes of a group.
template <class T>
NPU_INLINE int64_t group_rows(int64_t k, int64_t columns, const Parallel& parallel, int64_t most = kGroupBytes) {
  int64_t group = kGroupRows;
  const auto too_large = [&] {
    return group * k * static_cast<int64_t>(sizeof(T)) > most || ceil_div(columns, group) < 8 * parallel.num_threads();
  };
  while (group > 12 && too_large()) group /= 2;
  return group;
}

// fn(column, columns, more) for each group of weight rows, on all threads; `more`: the thread goes on with the group behind.
template <class T, class Fn>
inline void in_groups(const LinearParams& p, int64_t columns, int64_t sides, const Parallel& parallel, const Fn& fn) {
  const int64_t most = product_batches<T>(p.m) == 1 ? kPassingBytes : kGroupBytes;
  const int64_t group = group_rows<T>(p.k, columns, parallel, most), groups = ceil_div(columns, group);
  // about eight pieces a thread, none below 64 KiB of weights
  const int64_t bytes = sides * group * greater(1, p.k) * static_cast<int64_t>(sizeof(T));
  const int64_t grain = greater(groups / (parallel.num_threads() * 8), ceil_div(65536, bytes));
  parallel(groups, grain, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const bool more = (g + 2) * group <= columns;  // a thread's pieces follow one another
      fn(g * group, lesser(group, columns - g * group), more);
    }
  });
}

// Row m of `columns` columns: y holds the gates, or all there is, and from up_at on the ups.
template <class Epilogue>
NPU_INLINE void put_row(const Epilogue& epilogue, int64_t m, int64_t column, int64_t columns, const float* y, int64_t up_at) {
  for_vectors(columns, [&](int64_t j, auto left) {
    if constexpr (Epilogue::kSides == 2)
      epilogue.put(m, column + j, load_n(y + j, left), load_n(y + up_at + j, left), left);
    else
      epilogue.put(m, column + j, load_n(y + j, left), left);
  });
}

// All rows of x by the weight rows of columns [column, column + columns): the gates', then the ups', since both in one group, two
// streams of memory, took longer. `more`: another group follows.
template <class T, class Epilogue>
inline void group_of_rows(const LinearParams& p, const Epilogue& epilogue, const typename RowDot<T>::Packed* x, int64_t ldx, int64_t column,
                          int64_t columns, bool more) {
  constexpr int64_t kSides = Epilogue::kSides, ldy = kSides * kGroupRows;
  const int64_t batches = product_batches<T>(p.m);
  float* y = static_cast<float*>(thread_scratch(2, sizeof(float) * p.m * ldy));
  for (int64_t side = 0; side < kSides; ++side) {
    const T* w = static_cast<const T*>(p.w) + (column + side * (p.n / 2)) * p.ldw;
    const int64_t next = side + 1 < kSides ? p.n / 2 : more ? columns - side * (p.n / 2) : 0;  // rows
    for (int64_t b = 0; b < batches; ++b) {
      const int64_t from = b * p.m / batches, until = (b + 1) * p.m / batches;
      row_products<T>(until - from, y + from * ldy + side * kGroupRows, ldy, x + from * ldx, ldx, columns, [&](int64_t j) { return w + j * p.ldw; },
                      p.k, {next * p.ldw * static_cast<int64_t>(sizeof(T)), batches, b});
      for (int64_t m = from; m < until && side + 1 == kSides; ++m) put_row(epilogue, m, column, columns, y + m * ldy, kGroupRows);
    }
  }
}

template <class T, class Epilogue>
inline void linear_few(const LinearParams& p, const Epilogue& epilogue, const Parallel& parallel) {
  using Packed = typename RowDot<T>::Packed;
  const int64_t ldx = packed_length<T>(p.k), columns = p.n / Epilogue::kSides;
  Packed* x = static_cast<Packed*>(thread_scratch(kCallerSlots, sizeof(Packed) * (p.m * ldx + 1)));
  parallel(p.m, greater(1, 16384 / greater(1, p.k)), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) pack_row<T>(x + m * ldx, static_cast<const T*>(p.x) + m * p.ldx, p.k);
  });
  in_groups<T>(p, columns, Epilogue::kSides, parallel,
               [&](int64_t column, int64_t count, bool more) { group_of_rows<T>(p, epilogue, x, ldx, column, count, more); });
}

template <class T, class Epilogue, class X>
inline void linear_columns(const LinearParams& p, const Epilogue& epilogue, const X& x, int64_t column, int64_t columns, bool more) {
  constexpr int64_t kSide = kBlockColumns / Epilogue::kSides, kPanels = kBlockPanels / Epilogue::kSides;
  float* c = static_cast<float*>(thread_scratch(2, sizeof(float) * p.m * kBlockColumns));
  const T *w = static_cast<const T*>(p.w) + column * p.ldw, *ups = w + p.n / 2 * p.ldw;
  const auto row = [&](int64_t j) { return Epilogue::kSides == 1 || j < kSide ? w + j * p.ldw : ups + (j - kSide) * p.ldw; };
  const auto rows = [&](int64_t panel) { return lesser(kPanel, columns - panel % kPanels * kPanel); };
  block_product<T>(c, p.m, x, row, rows, p.k, more ? kSide * p.ldw : 0);
  for (int64_t m = 0; m < p.m; ++m) put_row(epilogue, m, column, columns, c + m * kBlockColumns, kSide);
}

// All of x as floats, in the order in which they meet the weights.
template <class T>
NPU_INLINE auto converted_rows(const LinearParams& p, const Parallel& parallel) {
  const auto row = [&](int64_t m) { return static_cast<const T*>(p.x) + m * p.ldx; };
  if constexpr (kInLanes<T>) {
    const int64_t groups = ceil_div(p.m, kRows), ld = lane_length(p.k);
    float* x = static_cast<float*>(thread_scratch(kCallerSlots, sizeof(float) * groups * ld));
    parallel(groups, greater(1, 16384 / greater(1, kRows * p.k)), [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        const int64_t first = g * p.m / groups;
        pack_lanes<T>(x + g * ld, [&](int64_t i) { return row(first + i); }, (g + 1) * p.m / groups - first, p.k);
      }
    });
    return LaneRows{x, ld};
  } else {
    const int64_t ld = p.k % 512 ? p.k : p.k + W;
    float* x = static_cast<float*>(thread_scratch(kCallerSlots, sizeof(float) * (p.m * ld + W)));
    parallel(p.m, greater(1, 16384 / greater(1, p.k)), [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) for_vectors(p.k, [&](int64_t j, auto n) { store_n(x + m * ld + j, load_n(row(m) + j, n), n); });
    });
    return FloatRows{x, ld};
  }
}

template <class T, class Epilogue>
inline void linear_many(const LinearParams& p, const Epilogue& epilogue, const Parallel& parallel) {
  constexpr int64_t kSide = kBlockColumns / Epilogue::kSides;
  static_assert(!kInLanes<T> || kFewRows<T> + 1 >= kLeastInLanes);
  const int64_t columns = p.n / Epilogue::kSides, blocks = ceil_div(columns, kSide);
  const auto x = converted_rows<T>(p, parallel);
  parallel(blocks, greater(1, blocks / (16 * parallel.num_threads())), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      linear_columns<T>(p, epilogue, x, i * kSide, lesser(kSide, columns - i * kSide), i + 1 < end && (i + 2) * kSide <= columns);
  });
}

}  // namespace
}  // namespace npu_ops::NPU_TIER

#if defined(NPU_AVX512_BF16)
#include "kernels/linear/turned.inc"
#endif

namespace npu_ops::NPU_TIER {
namespace {

// Epilogue<T> is made of the parameters: of a part of the rows where they come in parts.
template <class T, template <class> class Epilogue>
inline void linear_of(const LinearParams& p, const Parallel& parallel) {
#if defined(NPU_AMX)
  if constexpr (__is_same(T, bf16))
    if (p.m > kTooFewForTiles || batch_invariant()) return linear_tiles<Epilogue>(p, parallel);
#endif
  const bool few = batch_invariant();
#if defined(NPU_AVX512_BF16)
  if constexpr (__is_same(T, bf16)) {
    const EightWay way = eight_way();
    if (!few && way.takes(p.m)) return linear_eight<Epilogue<T>>(p, way, parallel);
  }
#endif
  if (p.m <= kFewRows<T> || (kTurned<T> && !fill_panels(p.m) && !few)) return linear_few<T>(p, Epilogue<T>{p}, parallel);
  const auto product = [&](int64_t first, int64_t count) {
    const LinearParams part = some_rows<T>(p, first, count);
    if (few) return linear_few<T>(part, Epilogue<T>{part}, parallel);
    if constexpr (kTurned<T>) linear_turned<Epilogue<T>>(part, parallel);
    else linear_many<T>(part, Epilogue<T>{part}, parallel);
  };
  in_parts(p.m, product, few ? kMostRows : lesser(kMostFloatRows, greater(kLeastRows, kFloatBytes / (4 * greater(1, p.k)))));
}

template <template <class> class Epilogue>
inline void linear_with(const LinearParams& p, const Parallel& parallel) {
  switch (p.dtype) {
    case Dtype::bf16:
      return linear_of<bf16, Epilogue>(p, parallel);
    case Dtype::fp16:
      return linear_of<fp16, Epilogue>(p, parallel);
    case Dtype::fp32:
      return linear_of<float, Epilogue>(p, parallel);
  }
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
