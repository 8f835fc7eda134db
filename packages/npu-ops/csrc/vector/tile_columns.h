// Columns of x w^T on AMX tiles: weight rows as the checkpoint stores them by packed rows of x.
//
// Few rows of x (decode): the weights come from memory once, and straight into tiles. They are read in 16 streams: strip i of a block
// holds its rows i, n + i, 2 n + i, ... for n strips, so that each stream goes on in the next strip where it ended in the last, as the
// processor expects of a stream, and what comes is fetched a little ahead.
// Many rows of x (an expert's; those of a linear layer: kernels/linear/many_rows.inc): weights are copied in pieces that stay in L1, and meet all rows of x, which stay in L2 meanwhile; so do the sums
// between the pieces of k. What comes next is fetched between the products.
// Either way a sum runs along k in one order: batch-invariant mode may use both.
#pragma once

#include "dispatch/parallel.h"
#include "vector/tile_products.h"

namespace npu_ops {
namespace {

// The weight rows of `columns` columns of the result: one each, or a gate's and an up's.
struct WeightBlock {
  const bf16* side[2];
  int64_t sides;
  int64_t stride;  // elements from a row to the next
  int64_t columns;
};

constexpr int64_t kStripGroups = 4;  // groups of 16 rows of x that meet a strip at once: their sums fill four tiles
constexpr int64_t kStripPasses = 2;  // of a strip, the first from memory and the next from L2: with more it is better copied
constexpr int64_t kTileElements = kTileSide * kTileSide;
constexpr int64_t kStripAhead = 1024;       // elements of a stream that are on their way
constexpr int64_t kStripBytes = 1 << 20;    // of packed rows of x that stay in L2
constexpr int64_t kPieceDepth = 512;        // elements of k in a piece of weights that stays in L1

NPU_INLINE int64_t strips_of(const WeightBlock& w) { return ceil_div(w.columns, kTileSide); }

// Strip i of a side, from element k of its rows on.
NPU_INLINE TileRows strip_of(const WeightBlock& w, int64_t side, int64_t i, int64_t k) {
  const int64_t n = strips_of(w);
  return {w.side[side] + i * w.stride + k, n * w.stride, ceil_div(w.columns - i, n)};
}

// One step of a strip, in tile 0, by the packed rows of G groups.
template <int G, int g = 0>
NPU_INLINE void meet_groups(const bf16* x, int64_t ldx) {
  if constexpr (g < G) {
    tile_load<1 + g % 3>(x + g * ldx, 64);
    tile_dp_bf16<4 + g, 0, 1 + g % 3>();
    meet_groups<G, g + 1>(x, ldx);
  }
}

template <int G>
NPU_INLINE void load_sums(const float* sums, bool first) {
  constexpr int64_t kRow = kTileSide * sizeof(float);
  if (first) {
    tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
    return;
  }
  tile_load<4>(sums, kRow);
  if constexpr (G > 1) tile_load<5>(sums + kTileElements, kRow);
  if constexpr (G > 2) tile_load<6>(sums + 2 * kTileElements, kRow);
  if constexpr (G > 3) tile_load<7>(sums + 3 * kTileElements, kRow);
}

template <int G>
NPU_INLINE void store_sums_of(float* sums) {
  constexpr int64_t kRow = kTileSide * sizeof(float);
  tile_store<4>(sums, kRow);
  if constexpr (G > 1) tile_store<5>(sums + kTileElements, kRow);
  if constexpr (G > 2) tile_store<6>(sums + 2 * kTileElements, kRow);
  if constexpr (G > 3) tile_store<7>(sums + 3 * kTileElements, kRow);
}

// sums[G] of 16 by 16 (=, or += unless `first`) a strip by G groups of packed rows, ldx elements apart. `next`: where the strip lies
// that comes after this one, or null.
template <int G>
inline void strip_by_groups(float* sums, bool first, const TileRows& w, const bf16* x, int64_t ldx, int64_t k, const bf16* next) {
  load_sums<G>(sums, first);
  const int64_t whole = w.rows == kTileSide ? k / kTileDepth * kTileDepth : 0, ahead = lesser(kStripAhead, whole);
  int64_t j = 0;
  const auto steps = [&](int64_t until, const bf16* fetch) {
    for (; j < until; j += kTileDepth) {
      if (fetch)
        for (int64_t i = 0; i < kTileSide; ++i) __builtin_prefetch(fetch + i * w.stride, 0, 2);
      fetch += kTileDepth;
      tile_load<0>(w.data + j, w.stride * static_cast<int64_t>(sizeof(bf16)));
      meet_groups<G>(x + j * kTileSide, ldx);
    }
  };
  steps(whole - ahead, w.data + ahead);
  if (next)
    steps(whole, next);
  else
    steps(whole, nullptr);
  for (; j < k; j += kTileDepth) {
    load_rows<0>(w, j, k - j);
    meet_groups<G>(x + j * kTileSide, ldx);
  }
  store_sums_of<G>(sums);
}

NPU_INLINE void strip_by_some(int64_t groups, float* sums, bool first, const TileRows& w, const bf16* x, int64_t ldx, int64_t k, const bf16* next) {
  switch (groups) {
    case 1:
      return strip_by_groups<1>(sums, first, w, x, ldx, k, next);
    case 2:
      return strip_by_groups<2>(sums, first, w, x, ldx, k, next);
    case 3:
      return strip_by_groups<3>(sums, first, w, x, ldx, k, next);
    default:
      return strip_by_groups<4>(sums, first, w, x, ldx, k, next);
  }
}

// sums[side][strip][group] of a block, up to kStripGroups * 16 rows. `next`: the block that this thread takes after this one, or null.
inline void strip_sums(float* sums, const WeightBlock& w, const bf16* x, int64_t groups, int64_t ldx, int64_t k, const WeightBlock* next) {
  const int64_t strips = strips_of(w), pieces = greater(1, ceil_div(groups * kTileSide * k * static_cast<int64_t>(sizeof(bf16)), kStripBytes));
  const int64_t depth = ceil_div(ceil_div(k, pieces), kTileDepth) * kTileDepth;
  for (int64_t from = 0; from == 0 || from < k; from += depth)
    for (int64_t side = 0; side < w.sides; ++side)
      for (int64_t i = 0; i < strips; ++i) {
        const bf16* then = i + 1 < strips         ? w.side[side] + (i + 1) * w.stride + from
                           : side + 1 < w.sides   ? w.side[side + 1] + from
                           : from + depth < k     ? w.side[0] + from + depth
                           : next                 ? next->side[0]
                                                  : nullptr;
        strip_by_some(groups, sums + (side * strips + i) * groups * kTileElements, from == 0, strip_of(w, side, i, from), x + from * kTileSide, ldx,
                      lesser(depth, k - from), then);
      }
}

// Lines of two strips that are fetched into L2, some whenever it is called, while others are multiplied.
struct FetchStrips {
  TileRows strips[2];
  int64_t lines;  // of a row
  int64_t strip = 0, row = 0, line = 0;

  NPU_INLINE void operator()(int64_t count) {
    for (; count > 0 && strip < 2; --count) {
      const TileRows& w = strips[strip];
      if (row < w.rows) __builtin_prefetch(w.data + row * w.stride + line * kTileDepth, 0, 2);
      if (++line < lines) continue;
      line = 0;
      if (++row < kTileSide) continue;
      row = 0;
      ++strip;
    }
  }
};

// sums[2][M] (=, or += unless `first`) two copied strips by M groups of packed rows. between(step) is called meanwhile.
template <int M, class Between>
NPU_INLINE void pair_by_groups(float* sums, bool first, const bf16* copies, const bf16* x, int64_t ldx, int64_t steps, const Between& between) {
  constexpr int64_t kStep = kTileDepth * kTileSide;
  load_sums<2 * M>(sums, first);
  for (int64_t s = 0; s < steps; ++s) {
    // all loads, then all products: a tenth faster than in turns
    tile_stream<2>(x + s * kStep, 64);
    if constexpr (M == 2) tile_stream<3>(x + ldx + s * kStep, 64);
    tile_load<0>(copies + s * kStep, 64);
    tile_load<1>(copies + (steps + s) * kStep, 64);
    tile_dp_bf16<4, 0, 2>();
    if constexpr (M == 2) tile_dp_bf16<5, 0, 3>();
    tile_dp_bf16<4 + M, 1, 2>();
    if constexpr (M == 2) tile_dp_bf16<7, 1, 3>();
    between(s);
  }
  store_sums_of<2 * M>(sums);
}

// Strips that are multiplied together: of gates and of ups, or neighbours.
NPU_INLINE int64_t pairs_of(const WeightBlock& w) { return ceil_div(w.columns, w.sides == 2 ? kTileSide : 2 * kTileSide); }
NPU_INLINE TileRows half_of_pair(const WeightBlock& w, int64_t pair, int64_t half, int64_t k) {
  const int64_t row = w.sides == 2 ? pair * kTileSide : (2 * pair + half) * kTileSide;
  return rows_for_tiles(w.side[w.sides == 2 ? half : 0] + row * w.stride + k, w.stride, w.columns - row);
}

// A pair's sums [2][groups] on their way to `finish`, a part at a time.
struct PairOfSums {
  const float* sums;
  int64_t pair, groups, group;  // the first of its groups
  int64_t parts, part = 0;

  template <class Finish>
  NPU_INLINE void finish_part(const WeightBlock& w, const Finish& finish) {
    const int64_t half = part / groups, g = part++ % groups, column = (w.sides == 2 ? pair : 2 * pair + half) * kTileSide;
    if (column >= w.columns) return;
    finish(group + g, column, [&](int64_t side, int64_t i) { return sums + ((side + half) * groups + g) * kTileElements + i * kTileSide; });
  }
};

// As tile_sums, for many rows. Between the products the strips that come next are fetched, and the sums before are finished.
template <class Finish>
inline void copied_sums(const WeightBlock& w, const bf16* x, int64_t groups, int64_t ldx, int64_t k, const WeightBlock* next, const Finish& finish) {
  const int64_t blocks = ceil_div(groups, 2), pairs = pairs_of(w);
  const int64_t pieces = greater(1, ceil_div(k, kPieceDepth)), most = ceil_div(ceil_div(k, pieces), kTileDepth) * kTileDepth;
  bf16* copies = static_cast<bf16*>(thread_scratch(0, sizeof(bf16) * 2 * (packed_tiles(most) + 1)));
  float* sums = static_cast<float*>(thread_scratch(1, sizeof(float) * 4 * kTileElements * (pieces > 1 ? pairs * blocks : 2)));
  PairOfSums done{nullptr, 0, 1, 0, 0};
  const int64_t turns = pieces * pairs;
  for (int64_t turn = 0; turn < turns; ++turn) {
    const int64_t pair = turn % pairs, from = turn / pairs * most, left = lesser(most, k - from), steps = ceil_div(left, kTileDepth);
    for (int64_t i = 0; i < 2; ++i) copy_rows(copies + i * steps * kTileDepth * kTileSide, half_of_pair(w, pair, i, from), left);
    const bool more = turn + 1 < turns;
    const WeightBlock& then = more || !next ? w : *next;
    const int64_t then_pair = more ? (turn + 1) % pairs : 0, then_from = more ? (turn + 1) / pairs * most : 0;
    FetchStrips fetch{{half_of_pair(then, then_pair, 0, then_from), half_of_pair(then, then_pair, 1, then_from)}, ceil_div(lesser(most, k - then_from), kTileDepth)};
    const int64_t share = more || next ? ceil_div(2 * kTileSide * fetch.lines, greater(1, blocks * steps)) : 0;
    const auto between = [&](int64_t step) {
      fetch(share);
      if (step % 4 == 2 && done.part < done.parts) done.finish_part(w, finish);
    };
    for (int64_t block = 0; block < blocks; ++block) {
      float* c = sums + (pieces > 1 ? pair * blocks + block : (pair * blocks + block) % 2) * 4 * kTileElements;
      const bf16* b = x + 2 * block * ldx + from * kTileSide;
      const int64_t some = lesser(2, groups - 2 * block);
      if (some == 2)
        pair_by_groups<2>(c, from == 0, copies, b, ldx, steps, between);
      else
        pair_by_groups<1>(c, from == 0, copies, b, ldx, steps, between);
      while (done.part < done.parts) done.finish_part(w, finish);
      if (turn / pairs + 1 == pieces) done = {c, pair, some, 2 * block, w.sides == 2 ? some : 2 * some};
    }
  }
  while (done.part < done.parts) done.finish_part(w, finish);
}

// Products of `rows` packed rows by a block of weight rows, which `finish` takes. `next`: the block that this thread takes after this
// one, or null. Takes the thread's scratch slots 0 and 1.
template <class Finish>
inline void tile_sums(const WeightBlock& w, const bf16* x, int64_t rows, int64_t k, const WeightBlock* next, const Finish& finish) {
  const int64_t ldx = packed_tiles(k), groups = ceil_div(rows, kTileSide), strips = strips_of(w), passes = ceil_div(groups, kStripGroups);
  if (passes > kStripPasses) return copied_sums(w, x, groups, ldx, k, next, finish);
  float* sums = static_cast<float*>(thread_scratch(1, sizeof(float) * w.sides * strips * kStripGroups * kTileElements));
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = pass * groups / passes, some = (pass + 1) * groups / passes - first;
    strip_sums(sums, w, x + first * ldx, some, ldx, k, pass + 1 < passes ? nullptr : next);
    for (int64_t g = 0; g < some; ++g)
      for (int64_t column = 0; column < w.columns; column += kTileSide)
        finish(first + g, column, [&](int64_t side, int64_t i) {
          const int64_t j = column + i;
          return sums + ((side * strips + j % strips) * some + g) * kTileElements + j / strips * kTileSide;
        });
  }
}

// out(row, column, F of 16 columns, F of their ups) for `rows` rows of x by the sums of 16 columns.
template <class At, class Out>
NPU_INLINE void turn_sums(const At& at, int64_t sides, int64_t row, int64_t rows, int64_t column, const Out& out) {
  if (sides == 1 && rows >= kTileSide) {  // in registers alone: stores beside tiles are dear
    F y[kTileSide];
#pragma GCC unroll 16
    for (int i = 0; i < kTileSide; ++i) y[i] = load(at(0, i));
    transpose(y);
#pragma GCC unroll 16
    for (int i = 0; i < kTileSide; ++i) out(row + i, column, y[i], y[i]);
    return;
  }
  F y[2][kTileSide];
  for (int64_t side = 0; side < 2; ++side) {
    for (int64_t i = 0; i < kTileSide; ++i) y[side][i] = load(at(side % sides, i));
    transpose(y[side]);
  }
  for (int64_t i = 0; i < lesser(kTileSide, rows); ++i) out(row + i, column, y[0][i], y[1][i]);
}

// The same by rows: out(row of x, column, F of 16 columns, F of their ups). What is past the block's columns is to be dropped.
template <class Out>
inline void tile_columns(const WeightBlock& w, const bf16* x, int64_t rows, int64_t k, const WeightBlock* next, const Out& out) {
  tile_sums(w, x, rows, k, next, [&](int64_t group, int64_t column, const auto& at) {
    turn_sums(at, w.sides, group * kTileSide, rows - group * kTileSide, column, out);
  });
}

}  // namespace
}  // namespace npu_ops
