// What the recurrences share: a block of a state's rows walks along its sequence as floats, the rows across the lanes.
#pragma once

#include "vector/any_dtype.h"
#include "vector/sequences.h"

namespace npu_ops {
namespace {

constexpr int64_t kRows = 2 * W;  // of a state that are a work item: the products with a token's vectors need no sum across lanes

// out[size][kRows] = state[rows][size], transposed; rows beyond are zero
template <class S>
inline void load_block(float* out, const S* state, int64_t rows, int64_t size) {
  int64_t j = 0;
  for (; j + W <= size; j += W)
    for (int64_t half = 0; half < kRows; half += W) {
      F r[W] = {};
      for (int64_t i = 0; i < lesser(W, rows - half); ++i) r[i] = load(state + (half + i) * size + j);
      transpose(r);
      for (int64_t i = 0; i < W; ++i) store(out + (j + i) * kRows + half, r[i]);
    }
  for (; j < size; ++j)
    for (int64_t i = 0; i < kRows; ++i) out[j * kRows + i] = i < rows ? to_float(state[i * size + j]) : 0.f;
}

template <class S>
inline void store_block(S* state, const float* in, int64_t rows, int64_t size) {
  int64_t j = 0;
  for (; j + W <= size; j += W)
    for (int64_t half = 0; half < rows; half += W) {
      F r[W];
      for (int64_t i = 0; i < W; ++i) r[i] = load(in + (j + i) * kRows + half);
      transpose(r);
      for (int64_t i = 0; i < lesser(W, rows - half); ++i) store(state + (half + i) * size + j, r[i]);
    }
  for (; j < size; ++j)
    for (int64_t i = 0; i < rows; ++i) store_n(state + i * size + j, set1(in[j * kRows + i]), 1);
}

// kRows lanes of a row of which `rows` count
template <class T>
NPU_INLINE Pair load_lanes(const T* p, int64_t rows) {
  return {load_n(p, rows), rows > W ? load_n(p + W, rows - W) : F{}};
}
template <class T>
NPU_INLINE void store_lanes(T* p, Pair x, int64_t rows) {
  store_n(p, x.a, rows);
  if (rows > W) store_n(p + W, x.b, rows - W);
}
inline Pair load_lanes_any(const void* p, Dtype dtype, int64_t from, int64_t rows) {
  Pair out{};
  with_dtype(dtype, [&](auto type) { out = load_lanes(static_cast<const decltype(type)*>(p) + from, rows); });
  return out;
}

template <class T>
inline void to_floats(float* out, const T* x, int64_t n) {
  for_vectors(n, [&](int64_t i, auto count) { store_n(out + i, load_n(x + i, count), count); });
}

// log(1 + e^x) as torch has it: x where x > 20. log1p by log(u) x / (u - 1), which is exact where u = 1 + x is rounded.
inline float softplus(float x) {
  if (x > 20.f) return x;
  const float e = __builtin_expf(x);
  return __builtin_log1pf(e);
}
inline F softplus(F x) {
  float lanes[W];
  store(lanes, x);
  for (int i = 0; i < W; ++i) lanes[i] = softplus(lanes[i]);
  return load(lanes);
}

NPU_INLINE F sigmoid(F x) { return set1(1.f) / (set1(1.f) + vexp(-x)); }

// body(sequence, head, first row, rows) for each block of rows of each head of each request with a slot, in parallel;
// padding(token, head, first row, rows) for the tokens of the others.
template <class Body, class Padding>
inline void for_blocks(const Sequences& sequences, int64_t heads, int64_t width, const Parallel& parallel, const Body& body, const Padding& padding) {
  const int64_t blocks = ceil_div(width, kRows), each = heads * blocks;
  parallel(sequences.requests * each, sequences.tokens > sequences.requests ? 1 : 4, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Sequence s = sequences.of(item / each);
      const int64_t head = item % each / blocks, row = item % blocks * kRows, rows = lesser(kRows, width - row);
      if (s.slot <= 0)
        for (int64_t t = s.begin; t < s.end; ++t) padding(t, head, row, rows);
      else if (s.begin < s.end)
        body(s, head, row, rows);
    }
  });
}

}  // namespace
}  // namespace npu_ops
