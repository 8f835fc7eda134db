// Columns of x w^T on AMX tiles: weight rows as the checkpoint stores them by packed rows of x.
//
// Few rows of x (decode): the weights come from memory once, and straight into tiles. They are read in 16 streams: strip i of a block
// holds its rows i, n + i, 2 n + i, ... for n strips, so that each stream goes on in the next strip where it ended in the last, as the
// processor expects of a stream, and what comes is fetched a little ahead. More than 64 rows meet a strip in two passes; each fetches
// half of the next block, so that lines come from memory as long as there are products.
// Many rows of x (an expert's; those of a linear layer: many_rows.h): weights are copied in pieces that stay in L1, and
// meet all rows of x, which stay in L2 meanwhile; so do the sums between the pieces of k. What comes next is fetched between the products.
// Either way a sum runs along k in one order: batch-invariant mode may use both.
#pragma once

#include "dispatch/parallel.h"
#include "vector/tile_products.h"

namespace npu_ops {
namespace {

constexpr int64_t kStripGroups = 4;  // groups of 16 rows of x that meet a strip at once: their sums fill four tiles
constexpr int64_t kStripPasses = 2;  // of a strip, the first from memory and the next from L2: with more it is better copied
constexpr int64_t kTileElements = kTileSide * kTileSide;
constexpr int64_t kStripAhead = 1024;       // elements of a stream that are on their way
constexpr int64_t kStripBytes = 512 << 10;  // of packed rows of x that meet strips before the next part of k does
constexpr int64_t kPieceDepth = 512;        // elements of k in a piece of weights that stays in L1

NPU_INLINE int64_t strips_of(const WeightBlock& w) { return ceil_div(w.columns, kTileSide); }

// Strip i of a side, from element k of its rows on.
NPU_INLINE TileRows strip_of(const WeightBlock& w, int64_t side, int64_t i, int64_t k) {
  const int64_t n = strips_of(w);
  return {w.side[side] + i * w.stride + k, n * w.stride, ceil_div(w.columns - i, n)};
}

// A line of each of rows [first, last) into L2.
template <int first, int last>
NPU_INLINE void fetch_lines(const bf16* at, int64_t stride) {
#pragma GCC unroll 16
  for (int i = first; i < last; ++i) __builtin_prefetch(at + i * stride, 0, 2);
}

// One step of a strip, in tile 0, by the packed rows of G groups. Lines of `fetch` on the way from memory hold up the tiles that come from
// L2, least so when they are asked for a few at a time.
template <int G, int L, int g = 0>
NPU_INLINE void meet_groups(const bf16* x, int64_t ldx, const bf16* fetch, int64_t stride) {
  if constexpr (g < G) {
    constexpr int kHalves = 2 * G;
    tile_load<1 + g % 3>(x + g * ldx, 64);
    fetch_lines<2 * g * L / kHalves, (2 * g + 1) * L / kHalves>(fetch, stride);
    tile_dp_bf16<4 + g, 0, 1 + g % 3>();
    fetch_lines<(2 * g + 1) * L / kHalves, (2 * g + 2) * L / kHalves>(fetch, stride);
    meet_groups<G, L, g + 1>(x, ldx, fetch, stride);
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

// Lines that a step fetches, as a type.
template <int L>
struct Lines {
  static constexpr int value = L;
};

// Rows of which a line is fetched at each step of a strip, L of them; before that, `ahead` elements from its end, the strip's own.
struct StripFetch {
  const bf16* data;  // or null
  int64_t stride, ahead;
};

// sums[G] of 16 by 16 (=, or += unless `first`) a strip by G groups of packed rows, ldx elements apart.
template <int G, int L>
inline void strip_by_groups(float* sums, bool first, const TileRows& w, const bf16* x, int64_t ldx, int64_t k, const StripFetch& fetch) {
  load_sums<G>(sums, first);
  const int64_t whole = w.rows == kTileSide ? k / kTileDepth * kTileDepth : 0, ahead = lesser(fetch.ahead, whole);
  int64_t j = 0;
  const auto steps = [&](auto lines, int64_t until, const bf16* from, int64_t stride) {
    for (; j < until; j += kTileDepth, from += kTileDepth) {
      tile_load<0>(w.data + j, w.stride * static_cast<int64_t>(sizeof(bf16)));
      meet_groups<G, decltype(lines)::value>(x + j * kTileSide, ldx, from, stride);
    }
  };
  steps(Lines<L>{}, whole - ahead, w.data + ahead, w.stride);
  if (fetch.data) steps(Lines<L>{}, whole, fetch.data, fetch.stride);
  else steps(Lines<0>{}, whole, w.data, 0);
  for (; j < k; j += kTileDepth) {
    load_rows<0>(w, j, k - j);
    meet_groups<G, 0>(x + j * kTileSide, ldx, nullptr, 0);
  }
  store_sums_of<G>(sums);
}

template <int L>
NPU_INLINE void strip_by_some(int64_t groups, float* sums, bool first, const TileRows& w, const bf16* x, int64_t ldx, int64_t k, const StripFetch& fetch) {
  switch (groups) {
    case 1:
      return strip_by_groups<1, L>(sums, first, w, x, ldx, k, fetch);
    case 2:
      return strip_by_groups<2, L>(sums, first, w, x, ldx, k, fetch);
    case 3:
      return strip_by_groups<3, L>(sums, first, w, x, ldx, k, fetch);
    default:
      return strip_by_groups<4, L>(sums, first, w, x, ldx, k, fetch);
  }
}

// A part of a block's k, of which strips meet all groups before those of the next part do.
struct StripPart {
  const WeightBlock* w;  // or null
  int64_t from;

  NPU_INLINE int64_t strips() const { return w ? w->sides * strips_of(*w) : 0; }
  NPU_INLINE TileRows strip(int64_t i) const { return strip_of(*w, i / strips_of(*w), i % strips_of(*w), from); }

  // What is fetched of strip i from row `first` on: nothing of one that there isn't, or of too few rows.
  NPU_INLINE StripFetch fetch(int64_t i, int64_t first, int64_t ahead) const {
    const TileRows rows = i < strips() ? strip(i) : TileRows{};
    return {rows.rows == kTileSide ? rows.data + first * rows.stride : nullptr, rows.stride, ahead};
  }
};

// Groups of rows by the strips of a part, `depth` elements of k: sums[strip][groups]. What is fetched meanwhile is the strip that comes next.
NPU_INLINE void meet_once(float* sums, const StripPart& part, int64_t depth, const bf16* x, int64_t groups, int64_t ldx, const StripPart& next) {
  const int64_t strips = part.strips();
  for (int64_t i = 0; i < strips; ++i) {
    const StripFetch fetch = i + 1 < strips ? part.fetch(i + 1, 0, kStripAhead) : next.fetch(0, 0, kStripAhead);
    strip_by_some<kTileSide>(groups, sums + i * groups * kTileElements, part.from == 0, part.strip(i), x, ldx, depth, fetch);
  }
}

// The same in pass 0 or 1 of two. Each fetches half of the next part.
NPU_INLINE void meet_in_pass(int64_t pass, float* sums, const StripPart& part, int64_t depth, const bf16* x, int64_t groups, int64_t ldx,
                             const StripPart& next) {
  const int64_t strips = part.strips();
  for (int64_t i = 0; i < strips; ++i) {
    const int64_t half = pass * strips + i;
    const StripFetch fetch = next.fetch(half / 2, half % 2 * (kTileSide / 2), depth);
    strip_by_some<kTileSide / 2>(groups, sums + i * groups * kTileElements, part.from == 0, part.strip(i), x, ldx, depth, fetch);
  }
}

// The groups that meet strips in a pass.
struct StripPasses {
  int64_t groups, count = ceil_div(groups, kStripGroups);

  NPU_INLINE int64_t first(int64_t pass) const { return pass * groups / count; }
};

// sums[strip][group] of a block, one pass after the other. `next`: the block that this thread takes after this one, or null.
inline void strip_sums(float* sums, const WeightBlock& w, const bf16* x, const StripPasses& passes, int64_t ldx, int64_t k, const WeightBlock* next) {
  const int64_t parts = greater(1, ceil_div(passes.groups * kTileSide * k * static_cast<int64_t>(sizeof(bf16)), kStripBytes));
  const int64_t most = ceil_div(ceil_div(k, parts), kTileDepth) * kTileDepth;
  for (int64_t from = 0; from == 0 || from < k; from += most) {
    const StripPart part{&w, from}, then = from + most < k ? StripPart{&w, from + most} : StripPart{next, 0};
    for (int64_t pass = 0; pass < passes.count; ++pass) {
      const int64_t first = passes.first(pass), some = passes.first(pass + 1) - first;
      float* of_pass = sums + first * part.strips() * kTileElements;
      const bf16* rows = x + first * ldx + from * kTileSide;
      if (passes.count == 1) meet_once(of_pass, part, lesser(most, k - from), rows, some, ldx, then);
      else meet_in_pass(pass, of_pass, part, lesser(most, k - from), rows, some, ldx, then);
    }
  }
}

// Lines of two strips that are fetched into L2, some whenever it is called, while others are multiplied.
struct FetchStrips {
  TileRows strips[2];
  int64_t lines_a_row, lines = 2 * kTileSide * lines_a_row;
  int64_t strip = 0, row = 0, line = 0;

  NPU_INLINE void operator()(int64_t count) {
    for (; count > 0 && strip < 2; --count) {
      const TileRows& w = strips[strip];
      if (row < w.rows) __builtin_prefetch(w.data + row * w.stride + line * kTileDepth, 0, 2);
      if (++line < lines_a_row) continue;
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
    const int64_t share = more || next ? ceil_div(fetch.lines, greater(1, blocks * steps)) : 0;
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

// Products of `rows` packed rows by a block of weight rows, which `finish` takes: a group and 16 columns, or 32 where there are few rows and
// it asks for them. `next`: the block that this thread takes after this one, or null. Takes the thread's scratch slots 0 and 1.
template <int64_t kColumns = kTileSide, class Finish>
inline void tile_sums(const WeightBlock& w, const bf16* x, int64_t rows, int64_t k, const WeightBlock* next, const Finish& finish) {
  const int64_t ldx = packed_tiles(k), strips = strips_of(w);
  const StripPasses passes{ceil_div(rows, kTileSide)};
  if (passes.count > kStripPasses) return copied_sums(w, x, passes.groups, ldx, k, next, finish);
  float* sums = static_cast<float*>(thread_scratch(1, sizeof(float) * w.sides * strips * passes.groups * kTileElements));
  strip_sums(sums, w, x, passes, ldx, k, next);
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    const int64_t first = passes.first(pass), some = passes.first(pass + 1) - first;
    for (int64_t g = 0; g < some; ++g)
      for (int64_t column = 0; column < w.columns; column += kColumns)
        finish(first + g, column, [&](int64_t side, int64_t i) {
          const int64_t j = column + i;
          return sums + ((first * w.sides + side * some) * strips + j % strips * some + g) * kTileElements + j / strips * kTileSide;
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
