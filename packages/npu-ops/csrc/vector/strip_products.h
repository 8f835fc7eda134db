// Products of many rows of bf16 by strips of weights on AVX512_BF16: what many_rows.h does on tiles.
//
// A thread takes up to 512 rows of x by 64 columns. Some hundred elements of k of their weights are packed at a time, stay in L2 and meet all of
// these rows, six at once; the sums lie in L2 between the pieces of k. Lines of the piece that comes next are fetched meanwhile.
// An Epilogue is one of kernels/linear/body.h, with one side; its parameters p have m, n, k, out and ldo. One without value() writes no bf16.
#pragma once

#include "dispatch/parallel.h"
#include "vector/strips.h"
#include "vector/turned_products.h"

namespace npu_ops {
namespace {

#if defined(NPU_AVX512_BF16)

constexpr int64_t kStripPairs = 2;    // beside six rows of x their sums fill the registers
constexpr int64_t kStripColumns = kStripPairs * kBlockSide;
constexpr int64_t kStripRows = 512;   // of x at a time
constexpr int64_t kStripDepth = 512;  // elements of k
constexpr int64_t kStripTurn = 48;    // rows between which some lines are fetched

// What follows the sums of rows [first, first + rows): sums[rows][kStripColumns] of the columns from `column` on.
template <class Epilogue>
inline void put_strips(const Epilogue& epilogue, const float* sums, int64_t first, int64_t rows, int64_t column, int64_t columns) {
  const auto& p = epilogue.p;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t j = 0; j < columns; j += 2 * W) {
      const float* at = sums + m * kStripColumns + j;
      const int64_t left = columns - j;
      if constexpr (requires { &Epilogue::template value<Whole>; })
        if (left >= 2 * W) {
          const F low = epilogue.value(first + m, column + j, load(at), Whole{}), high = epilogue.value(first + m, column + j + W, load(at + W), Whole{});
          put_line(static_cast<bf16*>(p.out) + (first + m) * p.ldo + column + j, low, high, false);
          continue;
        }
      epilogue.put(first + m, column + j, load(at), lesser(W, left));
      if (left > W) epilogue.put(first + m, column + j + W, load(at + W), left - W);
    }
}

// Rows [first, first + rows) of the result by the weights (vector/strips.h) of up to kStripColumns columns from `column` on. `next`: the weights that
// this thread takes after these, or null. Takes the thread's scratch slots 0, 1.
template <class Epilogue, class Weights>
inline void rows_by_strips(const Epilogue& epilogue, const PlainRows& x, int64_t first, int64_t rows, int64_t column, const Weights& w, const Weights* next) {
  const int64_t k = epilogue.p.k, pieces = greater(1, ceil_div(k, kStripDepth)), most = ceil_div(ceil_div(k, pieces), kTileDepth) * kTileDepth;
  bf16* weights = static_cast<bf16*>(thread_scratch(0, sizeof(bf16) * (2 * kStripPairs * packed_tiles(most) + 1)));
  float* sums = static_cast<float*>(thread_scratch(1, sizeof(float) * rows * kStripColumns));
  for (int64_t from = 0; from == 0 || from < k; from += most) {
    const int64_t depth = lesser(most, k - from), size = packed_tiles(depth), pairs = w.pairs();
    for (int64_t i = 0; i < pairs; ++i) w.pack(weights + 2 * i * size, i, from, depth);
    const bool deeper = from + most < k;
    const int64_t then = deeper ? from + most : 0;
    const auto fetch_of = [&](int64_t pair) { return (deeper || !next ? w : *next).fetch(pair, then, lesser(most, k - then)); };
    auto fetch = fetch_of(0), second = fetch_of(1);
    const int64_t share = deeper || next ? ceil_div(fetch.lines, ceil_div(rows, kStripTurn)) : 0;
    const TurnedLanes<1> lanes{reinterpret_cast<const float*>(weights), size / 2, pairs * kBlockSide};
    for (int64_t m = 0; m < rows; m += kStripTurn) {
      turned_product(sums + m * kStripColumns, kStripColumns, lesser(kStripTurn, rows - m), x.data + (first + m) * x.stride + from, x.stride, lanes, depth,
                     from > 0);
      fetch(share), second(share);
    }
  }
  put_strips(epilogue, sums, first, rows, column, w.columns);
}

// epilogue.p's product, all rows of x together. weights_of(column, columns): those of some columns, from a multiple of kStripColumns on.
template <class Epilogue, class WeightsOf>
inline void product_by_strips(const Epilogue& epilogue, const PlainRows& x, const Parallel& parallel, const WeightsOf& weights_of) {
  static_assert(Epilogue::kSides == 1);
  const auto& p = epilogue.p;
  const int64_t down = ceil_div(p.n, kStripColumns);
  int64_t across = ceil_div(p.m, kStripRows);
  while (across * down < 4 * parallel.num_threads() && p.m / across > 128) ++across;  // weights are packed for each part of the rows
  const int64_t rows = ceil_div(p.m, across), pieces = ceil_div(p.m, greater(1, rows)) * down;
  const auto weights = [&](int64_t piece) {
    const int64_t column = piece % down * kStripColumns;
    return weights_of(column, lesser(kStripColumns, p.n - column));
  };
  parallel(pieces, greater(1, pieces / (16 * parallel.num_threads())), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / down * rows;
      const auto w = weights(i), next = weights(lesser(i + 1, pieces - 1));
      rows_by_strips(epilogue, x, row, lesser(rows, p.m - row), i % down * kStripColumns, w, parallel.goes_on(i, pieces) ? &next : nullptr);
    }
  });
}

#endif

}  // namespace
}  // namespace npu_ops
