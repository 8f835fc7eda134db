// Products of bf16 or of bytes on AMX tiles, for many rows of x: tiles of x by packed weights, so that a sum's rows are the result's rows.
//
// A thread takes up to 512 rows of x, which stay in L2, by some columns. Weights are packed in pieces that stay in L1 and meet all of
// these rows; sums lie in L2 between the pieces of k. A block of 32 rows and columns is written while the next one is multiplied, a
// cache line a row, and a large result past the caches: they would not hold it, but read each line before it is written.
// A sum runs along k as in tile_columns.h, which has the fewer rows: batch-invariant mode may use both.
// An Epilogue is one of kernels/linear/body.h; its parameters p have m, n, k, out and ldo. One without value() writes no bf16. It gets the
// sums of bytes, which are integers, as they are.
#pragma once

#include "vector/tile_columns.h"

namespace npu_ops {
namespace {

constexpr int64_t kManyRows = 512;              // at a time
constexpr int64_t kBlockElements = kBlockSide * kBlockSide;
constexpr int64_t kStreamedBytes = 1 << 20;     // of a result, from which it is written past the caches
constexpr int64_t kPieceBytes = kPieceDepth * sizeof(bf16);  // of a row of weights, in a piece

// 32 columns of up to 32 rows on their way into the result, a row at a time.
struct FinishedBlock {
  bool stream = false;
  const float* sums[2] = {};  // of 16 columns each: of row i the gate's at row_at(i), and the up's a tile behind
  int64_t row = 0, rows = 0, column = 0, columns = 0, done = 0;

  NPU_INLINE static int64_t row_at(int64_t i) { return i / kTileSide * 2 * kTileElements + i % kTileSide * kTileSide; }

  // fn(row, column, what a column's sums are: one, or two) for 16 columns of a row that is not done
  template <class Epilogue, class Fn>
  NPU_INLINE auto with(int64_t part, const Fn& fn) const {
    const float* at = sums[part] + row_at(done);
    if constexpr (Epilogue::kSides == 2) return fn(row + done, column + part * kTileSide, load(at), load(at + kTileElements));
    else return fn(row + done, column + part * kTileSide, load(at));
  }

  template <class Epilogue>
  NPU_INLINE void put_rows(const Epilogue& epilogue, int64_t count) {
    const auto put = [&](int64_t m, int64_t j, auto... y) { epilogue.put(m, j, y..., column + columns - j); };
    for (; count > 0 && done < rows; --count, ++done) {
      if constexpr (requires { &Epilogue::template value<Whole>; })
        if (columns >= kBlockSide) {
          const auto value = [&](int64_t m, int64_t j, auto... y) { return epilogue.value(m, j, y..., Whole{}); };
          bf16* out = static_cast<bf16*>(epilogue.p.out) + (row + done) * epilogue.p.ldo + column;
          put_line(out, with<Epilogue>(0, value), with<Epilogue>(1, value), stream);
          continue;
        }
      with<Epilogue>(0, put);
      if (columns > kTileSide) with<Epilogue>(1, put);
    }
  }
};

// sums[2][2] (=, or += unless `first`) two groups of 16 rows of x by two strips of packed weights. between() is called meanwhile.
template <class E, class Between>
NPU_INLINE void block_of_sums(float* sums, bool first, const E* x, int64_t ldx, const E* weights, int64_t steps, const Between& between) {
  constexpr int64_t kStep = kTileBytes / sizeof(E);
  load_sums<4>(sums, first);
  for (int64_t s = 0; s < steps; ++s) {
    tile_stream<2>(x + s * kStep, 64);
    tile_stream<3>(x + ldx + s * kStep, 64);
    tile_load<0>(weights + s * kStep, 64);
    tile_load<1>(weights + (steps + s) * kStep, 64);
    tile_dp<E, 4, 2, 0>();
    tile_dp<E, 6, 3, 0>();
    tile_dp<E, 5, 2, 1>();
    tile_dp<E, 7, 3, 1>();
    between();
  }
  store_sums_of<4>(sums);
}

// Rows [first, first + rows) of the result by the weights (vector/strips.h) of the columns from `column` on; x: their first row's tiles. `next`:
// the weights that this thread takes after these, or null.
template <class Epilogue, class Weights, class E>
inline void many_rows(const Epilogue& epilogue, const E* x, int64_t first, int64_t rows, int64_t column, const Weights& w, const Weights* next) {
  constexpr bool kTwo = Epilogue::kSides == 2;
  const auto& p = epilogue.p;
  constexpr int64_t kDepth = kTileDepthOf<E>, kPiece = kPieceBytes / sizeof(E);
  const int64_t ldx = packed_tiles<E>(p.k), blocks = ceil_div(rows, kBlockSide), pairs = w.pairs();
  const int64_t pieces = greater(1, ceil_div(p.k, kPiece)), most = ceil_div(ceil_div(p.k, pieces), kDepth) * kDepth;
  E* weights = static_cast<E*>(thread_scratch(0, sizeof(E) * 2 * (packed_tiles<E>(most) + 1)));
  float* sums = static_cast<float*>(thread_scratch(1, sizeof(float) * kBlockElements * pairs * blocks));
  const auto sums_of = [&](int64_t pair, int64_t block) { return sums + (pair * blocks + block) * kBlockElements; };
  const bool lines = reinterpret_cast<uintptr_t>(p.out) % 64 == 0 && p.ldo * sizeof(bf16) % 64 == 0 && column % kBlockSide == 0;
  FinishedBlock done{lines && !Epilogue::kReadsOut && p.m * p.ldo * static_cast<int64_t>(sizeof(bf16)) > kStreamedBytes};
  const int64_t turns = pieces * pairs;
  for (int64_t turn = 0; turn < turns; ++turn) {
    const int64_t pair = turn % pairs, from = turn / pairs * most, left = lesser(most, p.k - from), steps = ceil_div(left, kDepth);
    w.pack(weights, pair, from, left);
    const bool more = turn + 1 < turns;
    const int64_t then_from = more ? (turn + 1) / pairs * most : 0;
    auto fetch = (more || !next ? w : *next).fetch(more ? (turn + 1) % pairs : 0, then_from, lesser(most, p.k - then_from));
    const int64_t share = more || next ? ceil_div(fetch.lines, greater(1, blocks * steps)) : 0;
    const int64_t put = ceil_div(kBlockSide, greater(1, steps));
    for (int64_t block = 0; block < blocks; ++block) {
      block_of_sums(sums_of(pair, block), from == 0, x + 2 * block * ldx + from * kTileSide, ldx, weights, steps, [&] {
        fetch(share);
        done.put_rows(epilogue, put);
      });
      done.put_rows(epilogue, kBlockSide);
      if (from + most < p.k || (kTwo && pair % 2 == 0 && pair + 1 < pairs)) continue;
      const int64_t before = kTwo ? pair / 2 * 2 : pair, at = before * (kTwo ? kTileSide : kBlockSide);
      const float* low = sums_of(before, block);
      done = {done.stream, {low, kTwo ? sums_of(pair, block) : low + kTileElements}, first + block * kBlockSide,
              lesser(kBlockSide, rows - block * kBlockSide), column + at, lesser(kBlockSide, w.columns - at)};
    }
  }
  done.put_rows(epilogue, kBlockSide);
}

// The result in pieces that threads take, those of the same rows of x one after the other.
struct ManyRowsGrid {
  int64_t rows, columns;  // of a piece
  int64_t down, pieces;   // pieces of the same rows; all

  ManyRowsGrid(int64_t m, int64_t n, int64_t sides, int64_t threads) {
    int64_t across = ceil_div(m, kManyRows);
    columns = 256 / sides;
    const auto count = [&] { return across * ceil_div(n, columns); };
    while (count() < 4 * threads && (columns > kBlockSide || m / across > 128))
      if (columns > kBlockSide && columns * sides * 2 > m / across) columns /= 2;
      else ++across;
    rows = ceil_div(ceil_div(m, across), kBlockSide) * kBlockSide;
    down = ceil_div(n, columns);
    pieces = ceil_div(m, rows) * down;
  }
};

// Tiles of rows of x, all together: [groups of 16 rows][packed_tiles(k)]. row_of(i) is row i's address.
template <class Row>
inline bf16* tiles_of_rows(int64_t m, int64_t k, const Parallel& parallel, const Row& row_of) {
  const int64_t ldx = packed_tiles(k), groups = ceil_div(m, kBlockSide) * 2;
  bf16* x = static_cast<bf16*>(thread_scratch(kCallerSlots, sizeof(bf16) * (groups * ldx + 1)));
  parallel(groups, greater(1, 4096 / greater(1, k)), [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) copy_rows(x + g * ldx, row_of(g * kTileSide), k);
  });
  return x;
}

// epilogue.p's product, all rows of x together, which `x` holds as tiles. weights_of(column, columns): those of
// some columns, from a multiple of kBlockSide on.
template <class Epilogue, class E, class WeightsOf>
inline void product_of_many_rows(const Epilogue& epilogue, const E* x, const Parallel& parallel, const WeightsOf& weights_of) {
  const auto& p = epilogue.p;
  const int64_t n = p.n / Epilogue::kSides, ldx = packed_tiles<E>(p.k);
  const ManyRowsGrid grid(p.m, n, Epilogue::kSides, parallel.num_threads());
  const auto weights = [&](int64_t piece) {
    const int64_t column = piece % grid.down * grid.columns;
    return weights_of(column, lesser(grid.columns, n - column));
  };
  parallel(grid.pieces, greater(1, grid.pieces / (16 * parallel.num_threads())), [&](int64_t begin, int64_t end) {
    const Tiles tiles;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / grid.down * grid.rows;
      const auto w = weights(i), next = weights(lesser(i + 1, grid.pieces - 1));
      many_rows(epilogue, x + row / kTileSide * ldx, row, lesser(grid.rows, p.m - row), i % grid.down * grid.columns, w,
                parallel.goes_on(i, grid.pieces) ? &next : nullptr);
    }
    _mm_sfence();  // what was written past the caches is there for whoever is told that the product is done
  });
}

}  // namespace
}  // namespace npu_ops
