// Body of the linear kernels with integer weights, compiled once a tier.
//
// x becomes 16-bit integers with a scale of its own for each block of k (float32: two, one for what the first leaves), so that the
// products are sums of exact integers, twice as many an instruction as in float; a block's sums are scaled and added in float.
// Sums do not depend on the number of rows: a row's result is the same whatever shares the batch.
#pragma once

#include "kernels/weight_only_linear/weight_only_linear.h"
#include "vector/panels.h"

namespace npu_ops::NPU_TIER {
namespace {

// ---- x to 16 bits ----

template <class T>
constexpr int kDigits = 1;
template <>
constexpr int kDigits<float> = 2;

// Rows of x as integers: digits rows a row of x, k padded to whole units.
struct Digits {
  int16_t* values;  // [rows][ld]
  float* scale;     // [rows][blocks]
  int32_t* sum;     // [rows][blocks]
  int64_t ld, block, blocks;
};

// Power of two s with |x| / s <= 2^15 for n elements; NaN when one is infinite or NaN.
template <class T>
NPU_INLINE float block_scale(const T* x, int64_t n, float* inverse) {
  U top = {};
  for_vectors(n, [&](int64_t i, auto left) {
    U a = bits_of(load_n(x + i, left)) & 0x7fffffffu;
    top = a > top ? a : top;
  });
  uint32_t most = 0;
  for (int i = 0; i < W; ++i) most = top[i] > most ? top[i] : most;
  int exponent = static_cast<int>(most >> 23) - 127;
  *inverse = 0;
  if (exponent == 128) return __builtin_nanf("");
  exponent = exponent < -100 ? -100 : exponent;
  const uint32_t scale = static_cast<uint32_t>(exponent - 14 + 127) << 23, inverted = static_cast<uint32_t>(14 - exponent + 127) << 23;
  float s;
  memcpy(&s, &scale, sizeof s);
  memcpy(inverse, &inverted, sizeof s);
  return s;
}

template <class T>
NPU_INLINE void digits_of_block(const Digits& d, const T* x, int64_t row, int64_t b, int64_t n) {
  int16_t* values = d.values + row * d.ld + b * d.block;
  float inverse;
  const float scale = block_scale(x, n, &inverse);
  I total = {}, rest = {};
  for_vectors(n, [&](int64_t i, auto left) {
    F scaled = load_n(x + i, left) * set1(inverse);
    I v = limited(rounded(scaled), -32767, 32767);
    total += v;
    store_low(values + i, v, left);
    if constexpr (kDigits<T> == 2) {
      I r = limited(rounded((scaled - to_floats(v)) * set1(32768.f)), -32767, 32767);
      rest += r;
      store_low(values + d.ld + i, r, left);
    }
  });
  d.scale[row * d.blocks + b] = scale;
  d.sum[row * d.blocks + b] = sum_of(total);
  if constexpr (kDigits<T> == 2) {
    d.scale[(row + 1) * d.blocks + b] = scale * 0x1p-15f;
    d.sum[(row + 1) * d.blocks + b] = sum_of(rest);
  }
}

template <class T>
inline void digits_of_row(const Digits& d, int64_t m, const T* x, int64_t size, const int32_t* order) {
  if (order) {
    T* ordered = static_cast<T*>(thread_scratch(0, sizeof(T) * size));
    for (int64_t i = 0; i < size; ++i) ordered[i] = x[order[i]];
    x = ordered;
  }
  for (int64_t b = 0; b < d.blocks; ++b) digits_of_block(d, x + b * d.block, m * kDigits<T>, b, lesser(d.block, size - b * d.block));
  for (int i = 0; i < kDigits<T>; ++i)
    for (int64_t k = size; k < d.ld; ++k) d.values[(m * kDigits<T> + i) * d.ld + k] = 0;
}

// ---- sums to results ----

// Scales a block's sums and adds them to c, [rows of x][4 vectors].
template <int D>
struct Scaled {
  float* c;
  const float* scale;  // of x: [rows], blocks apart
  const int32_t* sum;
  int64_t blocks;
  F w_scale[kVectors];
  I w_zero[kVectors];

  NPU_INLINE I start(int64_t row, int j) const { return w_zero[j] * -sum[row * blocks]; }
  NPU_INLINE void add(int64_t row, int j, I sums) const {
    float* to = c + (row / D * kVectors + j) * W;
    store(to, fma(to_floats(sums), w_scale[j] * set1(scale[row * blocks]), load(to)));
  }
};

template <class T>
NPU_INLINE void load_scales(F (&out)[kVectors], const T* scales) {
  if constexpr (kPairs == 1) {
    for (int j = 0; j < kVectors; ++j) out[j] = load(scales + j * W);
    return;
  }
  float s[kColumns];
  for (int64_t i = 0; i < kColumns; i += W) store(s + i, load(scales + i));
  for (int j = 0; j < kVectors; ++j) out[j] = both_pairs(s + j * 8);
}

// Powers of two by their exponents; half of them, because the codes are twice the values.
NPU_INLINE void load_scales(F (&out)[kVectors], const uint8_t* exponents) {
  float s[kColumns];
  for (int64_t i = 0; i < kColumns; ++i) {
    const uint32_t bits = exponents[i] ? uint32_t{exponents[i]} << 23 : 0x00400000u;
    memcpy(s + i, &bits, sizeof bits);
  }
  for (int j = 0; j < kVectors; ++j) out[j] = both_pairs(s + j * 8) * set1(0.5f);
}

// Place of the scales and zero points of panel `panel` for block b of k.
NPU_INLINE int64_t group_of(const WeightOnlyLinearParams& p, const Digits& d, int64_t panel, int64_t b) {
  return (panel * ceil_div(p.k, p.group) + b * d.block / p.group) * kColumns;
}
NPU_INLINE void scales_of(const WeightOnlyLinearParams& p, int64_t at, F (&out)[kVectors]) {
  if (p.format == PanelFormat::mxfp4) return load_scales(out, static_cast<const uint8_t*>(p.scales) + at);
  switch (p.scale_dtype) {
    case Dtype::bf16:
      return load_scales(out, static_cast<const bf16*>(p.scales) + at);
    case Dtype::fp16:
      return load_scales(out, static_cast<const fp16*>(p.scales) + at);
    case Dtype::fp32:
      return load_scales(out, static_cast<const float*>(p.scales) + at);
  }
}
NPU_INLINE void zeros_of(const WeightOnlyLinearParams& p, int64_t at, I (&out)[kVectors]) {
  const int8_t symmetric = p.format == PanelFormat::int4 ? 8 : p.format == PanelFormat::mxfp4 ? kCodesZero : 0;
  const int8_t same[8] = {symmetric, symmetric, symmetric, symmetric, symmetric, symmetric, symmetric, symmetric};
  for (int j = 0; j < kVectors; ++j) out[j] = first_pair(p.zeros ? p.zeros + at + j * 8 : same);
}

template <int D>
NPU_INLINE Scaled<D> scaled_block(const WeightOnlyLinearParams& p, const Digits& d, float* c, int64_t panel, int64_t b) {
  Scaled<D> policy{c, d.scale + b, d.sum + b, d.blocks, {}, {}};
  const int64_t at = group_of(p, d, panel, b);
  scales_of(p, at, policy.w_scale);
  zeros_of(p, at, policy.w_zero);
  return policy;
}

// ---- weights in groups, x in floating point ----

constexpr int64_t kPanelsAtATime = 2;
constexpr int64_t kBlock = 128;  // elements of k at a time: sums of 8-bit weights by 16-bit x stay below 2^31
constexpr int64_t kDirectRows = 2 * kTileRows;  // up to here each tile unpacks the weights by itself

// A panel beside one row, whose sums stay in registers: what `panels` computes, for groups that are over soon.
template <class Source, class Out>
inline void panel_of_one_row(const WeightOnlyLinearParams& p, const Digits& d, int64_t panel) {
  F y[kVectors] = {};
  for (int64_t b = 0; b < d.blocks; ++b) {
    const int64_t at = group_of(p, d, panel, b), steps = lesser(d.block, d.ld - b * d.block) / kStep;
    const Source w{p.w + (panel * (d.ld / 4) + b * d.block / 4) * Source::kUnit};
    const int16_t* x = d.values + b * d.block;
    I sums[kVectors];
    zeros_of(p, at, sums);
    for (int j = 0; j < kVectors; ++j) sums[j] *= -d.sum[b];
    for (int64_t s = 0; s < steps; ++s) {
      I v[kVectors];
      w.fetch(v, s, 0);
      const I pairs = pairs_of(x + s * kStep);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sums[j] = add_pair_products(sums[j], v[j], pairs);
    }
    F scales[kVectors];
    scales_of(p, at, scales);
    for (int j = 0; j < kVectors; ++j) y[j] = fma(to_floats(sums[j]), scales[j] * set1(d.scale[b]), y[j]);
  }
  float c[kVectors * W];
  for (int j = 0; j < kVectors; ++j) store(c + j * W, y[j]);
  const int64_t n = panel * kColumns;
  store_columns(static_cast<Out*>(p.out) + n, p.bias ? static_cast<const Out*>(p.bias) + n : nullptr, c, lesser(kColumns, p.n - n));
}

// Out: the element of the result, x's own or float
template <class T, class Source, class Out = T>
inline void panels(const WeightOnlyLinearParams& p, const Digits& d, int64_t first, int64_t count) {
  constexpr int D = kDigits<T>;
  const int64_t rows = p.m * D, row_floats = kVectors * W, units = d.ld / 4;
  if (rows == 1) {
    for (int64_t i = 0; i < count; ++i) panel_of_one_row<Source, Out>(p, d, first + i);
    return;
  }
  float* c = static_cast<float*>(thread_scratch(1, sizeof(float) * count * p.m * row_floats));
  memset(c, 0, sizeof(float) * count * p.m * row_floats);
  int16_t* unpacked = static_cast<int16_t*>(thread_scratch(2, sizeof(int16_t) * count * kBlock * kColumns));
  // blocks that fill kBlock together share a visit of the rows
  const int64_t parts = kBlock / d.block;
  Scaled<D> policy[kPanelsAtATime][kBlock / 4];
  for (int64_t b0 = 0; b0 < d.blocks; b0 += parts) {
    const int64_t b1 = lesser(d.blocks, b0 + parts);
    const auto steps = [&](int64_t b) { return lesser(d.block, d.ld - b * d.block) / kStep; };
    const auto buffer = [&](int64_t i, int64_t b) { return unpacked + (i * kBlock + (b - b0) * d.block) * kColumns; };
    for (int64_t i = 0; i < count; ++i)
      for (int64_t b = b0; b < b1; ++b) {
        const Source w{p.w + ((first + i) * units + b * d.block / 4) * Source::kUnit};
        policy[i][b - b0] = scaled_block<D>(p, d, c + i * p.m * row_floats, first + i, b);
        if (rows <= kDirectRows)
          block_rows(policy[i][b - b0], w, d.values + b * d.block, d.ld, rows, steps(b));
        else
          unpack_block(buffer(i, b), w, steps(b));
      }
    if (rows <= kDirectRows) continue;
    const int64_t tiles = ceil_div(p.m, kTileRows / D);  // the digits of a row stay together, or else their order would depend on p.m
    for (int64_t t = 0; t < tiles; ++t)
      for (int64_t i = 0; i < count; ++i)
        for (int64_t b = b0; b < b1; ++b) {
          const int64_t row = t * p.m / tiles * D;
          tile<kTileRows>((t + 1) * p.m / tiles * D - row, policy[i][b - b0], Unpacked{buffer(i, b)}, d.values + b * d.block, d.ld, row, steps(b));
        }
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = (first + i) * kColumns;
    for (int64_t m = 0; m < p.m; ++m)
      store_columns(static_cast<Out*>(p.out) + m * p.ldo + n, p.bias ? static_cast<const Out*>(p.bias) + n : nullptr,
                    c + (i * p.m + m) * row_floats, lesser(kColumns, p.n - n));
  }
}

// `row(m)`: the address of a row of x. `order(m)`: its order or null.
template <class T, class Row, class Order>
inline Digits digits_of(int64_t m, int64_t k, int64_t group, const Row& row, const Order& order, const Parallel& parallel) {
  const int64_t rows = m * kDigits<T>;
  Digits d;
  d.ld = ceil_div(k, 4) * 4;
  d.block = lesser(group, kBlock);
  d.blocks = ceil_div(k, d.block);
  d.values = static_cast<int16_t*>(thread_scratch(kCallerSlots, sizeof(int16_t) * rows * d.ld));
  d.scale = static_cast<float*>(thread_scratch(kCallerSlots + 1, sizeof(float) * rows * d.blocks));
  d.sum = static_cast<int32_t*>(thread_scratch(kCallerSlots + 2, sizeof(int32_t) * rows * d.blocks));
  parallel(m, greater(1, 16384 / greater(1, k)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) digits_of_row<T>(d, i, row(i), k, order(i));
  });
  return d;
}

template <class T, class Source>
inline void weight_only(const WeightOnlyLinearParams& p, const Parallel& parallel) {
  const auto row = [&](int64_t m) { return static_cast<const T*>(p.x) + m * p.ldx; };
  const Digits d = digits_of<T>(p.m, p.k, p.group, row, [&](int64_t) { return p.order; }, parallel);
  const int64_t count = ceil_div(p.n, kColumns);
  const int64_t together = p.m > 16 ? kPanelsAtATime : 1;
  const int64_t grain = p.m > 16 ? 1 : panels_a_piece(count, d.ld / 4 * Source::kUnit, parallel);
  parallel(ceil_div(count, together), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) panels<T, Source>(p, d, i * together, lesser(together, count - i * together));
  });
}

// fn(Source) for the format's source of weights
template <class Fn>
inline void with_source(PanelFormat format, const Fn& fn) {
  switch (format) {
    case PanelFormat::int4:
      return fn(Nibbles{});
    case PanelFormat::int8:
      return fn(Bytes{});
    case PanelFormat::mxfp4:
      return fn(Codes{});
  }
}

template <class T>
inline void weight_only_of(const WeightOnlyLinearParams& p, const Parallel& parallel) {
  in_parts(p.m, [&](int64_t first, int64_t count) {
    WeightOnlyLinearParams part = p;
    part.x = static_cast<const T*>(p.x) + first * p.ldx;
    part.out = static_cast<T*>(p.out) + first * p.ldo;
    part.m = count;
    with_source(p.format, [&](auto source) { weight_only<T, decltype(source)>(part, parallel); });
  });
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
