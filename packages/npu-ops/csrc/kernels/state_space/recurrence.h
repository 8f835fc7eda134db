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

// Natural logarithm of x in [1, 2^30], relative error below 2e-7: exponent and mantissa around one, and a minimax polynomial
// (Moshier's Cephes library).
NPU_INLINE F log_from_one(F x) {
  const U bits = bits_of(x) - 0x3f3504f3u;  // the mantissa will lie between the roots of 1/2 and 2
  F e;
  for (int i = 0; i < W; ++i) e[i] = static_cast<float>(static_cast<int32_t>(bits[i]) >> 23);
  const F f = from_bits((bits & 0x007fffffu) + 0x3f3504f3u) - set1(1.f), z = f * f;
  F p = set1(7.0376836292e-2f);
  p = fma(p, f, set1(-1.1514610310e-1f));
  p = fma(p, f, set1(1.1676998740e-1f));
  p = fma(p, f, set1(-1.2420140846e-1f));
  p = fma(p, f, set1(1.4249322787e-1f));
  p = fma(p, f, set1(-1.6668057665e-1f));
  p = fma(p, f, set1(2.0000714765e-1f));
  p = fma(p, f, set1(-2.4999993993e-1f));
  p = fma(p, f, set1(3.3333331174e-1f));
  p = fma(e, set1(-2.12194440e-4f), p * f * z);
  return fma(e, set1(0.693359375f), f + fma(set1(-0.5f), z, p));
}

// log(1 + e^x) as torch has it: x where x > 20. With u = 1 + e^x as it is rounded, log(u) e^x / (u - 1) loses nothing of a small
// e^x.
NPU_INLINE F softplus(F x) {
  const F e = vexp(x), u = e + set1(1.f), rest = u - set1(1.f);
  const F y = rest > F{} ? log_from_one(u) * (e / rest) : e;
  return x > set1(20.f) ? x : y;
}
inline float softplus(float x) { return softplus(set1(x))[0]; }

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
