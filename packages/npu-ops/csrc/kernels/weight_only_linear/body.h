// Body of the linear kernels with integer weights, compiled once a tier.
//
// x becomes 16-bit integers with a scale of its own for each block of k (float32: two, one for what the first leaves), so that the
// products are sums of exact integers, twice as many an instruction as in float; a block's sums are scaled and added in float.
// Rows of bf16 meet weights as bf16 where the processor multiplies those by vectors (code_vectors.inc). Weights of e4m3 (MXFP8) do so on tiles as well, and are
// floats elsewhere (e4m3_floats.inc), as rows of x then are.
// Sums do not depend on the number of rows: a row's result is the same whatever shares the batch. But for bf16 of many rows where that is multiplied
// fastest (scaled_strips.inc), and of NVFP4 on AVX2 (nvfp4_floats.inc), outside batch-invariant mode.
#pragma once

#include "dispatch/batch_invariance.h"
#include "kernels/weight_only_linear/weight_only_linear.h"
#include "vector/codes.h"
#include "vector/e4m3_panels.h"
#include "vector/past_caches.h"
#if defined(NPU_AMX)
#include "vector/panel_tiles.h"
#endif

namespace npu_ops::NPU_TIER {
namespace {

// ---- x to 16 bits ----

template <class T>
constexpr int kDigits = 1;
template <>
constexpr int kDigits<float> = 2;

// Rows of x as integers: digits rows a row of x, zero behind each block's end.
struct Digits {
  int16_t* values;  // [rows][ld]
  float* scale;     // [rows][blocks]
  int32_t* sum;     // [rows][blocks]
  int64_t k;        // of the weights' whole units
  int64_t block, blocks;
  int64_t stride, ld;  // elements from a block to the next, and from a row
  int64_t room;        // rows

  // Elements of block b in whole units.
  NPU_INLINE int64_t size(int64_t b) const { return lesser(block, k - b * block); }
  // Rows from `from` on.
  NPU_INLINE Digits rows(int64_t from) const { return {values + from * ld, scale + from * blocks, sum + from * blocks, k, block, blocks, stride, ld, room - from}; }
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
  int16_t* values = d.values + row * d.ld + b * d.stride;
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
  for (int64_t b = 0; b < d.blocks; ++b) {
    const int64_t count = lesser(d.block, size - b * d.block);
    digits_of_block(d, x + b * d.block, m * kDigits<T>, b, count);
    for (int i = 0; i < kDigits<T>; ++i) {
      int16_t* values = d.values + (m * kDigits<T> + i) * d.ld + b * d.stride;
      for (int64_t k = count; k < d.stride; ++k) values[k] = 0;
    }
  }
}

// The same for all threads.
template <class T>
inline void shared_digits_of_row(const Digits& d, int64_t m, const T* x, int64_t size, const int32_t* order) {
#if defined(NPU_AVX512)
  const int64_t rows = kDigits<T>, elements = rows * d.ld;
  Digits own = d.rows(m * rows);
  own.values = static_cast<int16_t*>(thread_scratch(1, sizeof(int16_t) * elements));
  digits_of_row<T>(own, 0, x, size, order);
  copy_past_caches(d.values + m * elements, own.values, sizeof(int16_t) * elements);
  _mm_sfence();
#else
  digits_of_row<T>(d, m, x, size, order);
#endif
}

// ---- sums to results ----

// Scales a block's sums and adds them to c, [rows of x][columns].
template <int D>
struct Scaled {
  float* c;
  const float* scale;  // of x: [rows], blocks apart
  const int32_t* sum;
  int64_t blocks;
  F w_scale[kSums];
  I w_zero[kVectors];

  NPU_INLINE I start(int64_t row, int j) const { return w_zero[j] * -sum[row * blocks]; }
  template <int V>
  NPU_INLINE void add(int64_t row, int first, const I (&sums)[V]) const {
    I whole[V / kPairs];
    by_column(whole, sums);
#pragma GCC unroll 4
    for (int j = 0; j < V / kPairs; ++j) {
      const int at = first / kPairs + j;
      float* to = c + row / D * kColumns + at * W;
      store(to, fma(to_floats(whole[j]), w_scale[at] * set1(scale[row * blocks]), load(to)));
    }
  }
};

template <class T>
NPU_INLINE void load_scales(F (&out)[kSums], const T* scales) {
  for (int j = 0; j < kSums; ++j) out[j] = load(scales + j * W);
}

// Powers of two by their exponents; half of them for MXFP4, whose codes are twice the values.
NPU_INLINE void load_scales(F (&out)[kSums], const uint8_t* exponents, float factor = 0.5f) {
  typedef uint8_t U8 __attribute__((vector_size(W)));
  for (int j = 0; j < kSums; ++j) {
    const U exponent = __builtin_convertvector(load_raw<U8>(exponents + j * W), U);
    out[j] = from_bits(exponent == 0u ? U{} + 0x00400000u : exponent << 23) * set1(factor);
  }
}

// Codes of e4m3 times their columns' factors; half of them, as of MXFP4.
NPU_INLINE void load_scales(F (&out)[kSums], const fp8* codes, const float* factors) {
  for (int j = 0; j < kSums; ++j) out[j] = load(codes + j * W) * (load(factors + j * W) * set1(0.5f));
}

// A panel's group of k.
struct PanelGroup {
  int64_t panel, group, groups;
  // Place of its zero points, and of scales but those of nvfp4.
  NPU_INLINE int64_t at() const { return (panel * groups + group) * kColumns; }
};
// The one of block b of k.
NPU_INLINE PanelGroup group_of(const WeightOnlyLinearParams& p, const Digits& d, int64_t panel, int64_t b) {
  return {panel, b * d.block / p.group, ceil_div(p.k, p.group)};
}
NPU_INLINE void scales_of(const WeightOnlyLinearParams& p, const PanelGroup& g, F (&out)[kSums]) {
  const int64_t at = g.at();
  if (p.format == PanelFormat::mxfp4) return load_scales(out, static_cast<const uint8_t*>(p.scales) + at);
  if (p.format == PanelFormat::nvfp4) {
    const fp8* of_panel = static_cast<const fp8*>(p.scales) + g.panel * (kFactorRows + g.groups) * kColumns;
    return load_scales(out, of_panel + (kFactorRows + g.group) * kColumns, reinterpret_cast<const float*>(of_panel));
  }
  switch (p.scale_dtype) {
    case Dtype::bf16:
      return load_scales(out, static_cast<const bf16*>(p.scales) + at);
    case Dtype::fp16:
      return load_scales(out, static_cast<const fp16*>(p.scales) + at);
    case Dtype::fp32:
      return load_scales(out, static_cast<const float*>(p.scales) + at);
  }
}
// The code that stands for zero where weights have no zero points.
constexpr int8_t code_of_zero(PanelFormat format) { return format == PanelFormat::int4 ? 8 : is_e2m1(format) ? kCodesZero : 0; }
NPU_INLINE void zeros_of(const WeightOnlyLinearParams& p, const PanelGroup& g, I (&out)[kVectors]) {
  const int8_t symmetric = code_of_zero(p.format);
  const int8_t same[8] = {symmetric, symmetric, symmetric, symmetric, symmetric, symmetric, symmetric, symmetric};
  for (int j = 0; j < kVectors; ++j) out[j] = first_pair(p.zeros ? p.zeros + g.at() + j * 8 : same);
}

template <int D>
NPU_INLINE Scaled<D> scaled_block(const WeightOnlyLinearParams& p, const Digits& d, float* c, int64_t panel, int64_t b) {
  Scaled<D> policy{c, d.scale + b, d.sum + b, d.blocks, {}, {}};
  const PanelGroup group = group_of(p, d, panel, b);
  scales_of(p, group, policy.w_scale);
  zeros_of(p, group, policy.w_zero);
  return policy;
}

// ---- weights in groups, x in floating point ----

constexpr int64_t kBlock = 128;  // elements of k at a time: sums of 8-bit weights by 16-bit x stay below 2^31
constexpr int64_t kDirectRows = 2 * kTileRows;  // up to here each tile unpacks the weights by itself

// Panels beside one row, whose sums stay in registers: what `panels` computes, for groups that are over soon.
template <class Source, class Out, int N>
inline void panels_of_one_row(const WeightOnlyLinearParams& p, const Digits& d, const Streams<N>& panel) {
  F y[N][kSums] = {};
  for (int64_t b = 0; b < d.blocks; ++b) {
    I sums[N][kVectors];
    Source w[N];
#pragma GCC unroll 2
    for (int i = 0; i < N; ++i) {
      w[i] = {p.w + (panel[i] * (d.k / 4) + b * d.block / 4) * Source::kUnit};
      zeros_of(p, group_of(p, d, panel[i], b), sums[i]);
      for (int j = 0; j < kVectors; ++j) sums[i][j] *= -d.sum[b];
    }
    add_row_products(sums, w, d.values + b * d.stride, d.size(b) / kStep);
#pragma GCC unroll 2
    for (int i = 0; i < N; ++i) {
      I whole[kSums];
      by_column(whole, sums[i]);
      F scales[kSums];
      scales_of(p, group_of(p, d, panel[i], b), scales);
      for (int j = 0; j < kSums; ++j) y[i][j] = fma(to_floats(whole[j]), scales[j] * set1(d.scale[b]), y[i][j]);
    }
  }
  for (int i = 0; i < N; ++i) {
    float c[kColumns];
    for (int j = 0; j < kSums; ++j) store(c + j * W, y[i][j]);
    const int64_t n = panel[i] * kColumns;
    store_columns(static_cast<Out*>(p.out) + n, p.bias ? static_cast<const Out*>(p.bias) + n : nullptr, c, lesser(kColumns, p.n - n));
  }
}

// The results of `count` panels from `first` on: c [panels][rows][columns].
template <class Out>
inline void store_panels(const WeightOnlyLinearParams& p, const float* c, int64_t first, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = (first + i) * kColumns;
    for (int64_t m = 0; m < p.m; ++m)
      store_columns(static_cast<Out*>(p.out) + m * p.ldo + n, p.bias ? static_cast<const Out*>(p.bias) + n : nullptr,
                    c + (i * p.m + m) * kColumns, lesser(kColumns, p.n - n));
  }
}

// Out: the element of the result, x's own or float
template <class T, class Source, class Out = T>
inline void panels(const WeightOnlyLinearParams& p, const Digits& d, int64_t first, int64_t count) {
  constexpr int D = kDigits<T>;
  const int64_t rows = p.m * D, units = d.k / 4;
  float* c = static_cast<float*>(thread_scratch(1, sizeof(float) * count * p.m * kColumns));
  memset(c, 0, sizeof(float) * count * p.m * kColumns);
  int16_t* unpacked = static_cast<int16_t*>(thread_scratch(2, sizeof(int16_t) * count * kBlock * kColumns));
  // blocks that fill kBlock together share a visit of the rows
  const int64_t parts = kBlock / d.block;
  Scaled<D> policy[kPanelsAtATime][kBlock / 4];
  for (int64_t b0 = 0; b0 < d.blocks; b0 += parts) {
    const int64_t b1 = lesser(d.blocks, b0 + parts);
    const auto buffer = [&](int64_t i, int64_t b) { return unpacked + (i * kBlock + (b - b0) * d.block) * kColumns; };
    for (int64_t i = 0; i < count; ++i)
      for (int64_t b = b0; b < b1; ++b) {
        const Source w{p.w + ((first + i) * units + b * d.block / 4) * Source::kUnit};
        policy[i][b - b0] = scaled_block<D>(p, d, c + i * p.m * kColumns, first + i, b);
        if (rows <= kDirectRows)
          block_rows(policy[i][b - b0], w, d.values + b * d.stride, d.ld, rows, d.size(b) / kStep);
        else
          unpack_block(buffer(i, b), w, d.size(b) / kStep);
      }
    if (rows <= kDirectRows) continue;
    const int64_t tiles = ceil_div(p.m, kTileRows / D);  // the digits of a row stay together, or else their order would depend on p.m
    for (int64_t t = 0; t < tiles; ++t)
      for (int64_t i = 0; i < count; ++i)
        for (int64_t b = b0; b < b1; ++b) {
          const int64_t row = t * p.m / tiles * D;
          tile<kTileRows>((t + 1) * p.m / tiles * D - row, policy[i][b - b0], Unpacked{buffer(i, b)}, d.values + b * d.stride, d.ld, row, d.size(b) / kStep);
        }
  }
  store_panels<Out>(p, c, first, count);
}

// The same of any number of panels [first, last), some at a time.
template <class T, class Source, class Out = T>
inline void all_panels(const WeightOnlyLinearParams& p, const Digits& d, int64_t first, int64_t last) {
  if (p.m * kDigits<T> == 1) return in_streams(first, last - first, [&](const auto& panel) { panels_of_one_row<Source, Out>(p, d, panel); });
  const int64_t together = panels_at_a_time(p.m);
  for (int64_t i = first; i < last; i += together) panels<T, Source, Out>(p, d, i, lesser(together, last - i));
}

}  // namespace
}  // namespace npu_ops::NPU_TIER

#include "kernels/weight_only_linear/e4m3_floats.inc"
#if defined(__AVX2__) && !defined(NPU_AVX512)
#include "kernels/weight_only_linear/nvfp4_floats.inc"
#endif
#if defined(NPU_AMX)
#include "kernels/weight_only_linear/scaled_tiles.inc"
#include "kernels/weight_only_linear/tiles.inc"
#elif defined(NPU_AVX512_BF16)
#include "kernels/weight_only_linear/scaled_vectors.inc"
#endif

namespace npu_ops::NPU_TIER {
namespace {

// Room for the digits of rows of k elements, in the caller's scratch slots `slot` to `slot` + 2. `unit`: what blocks are filled up to;
// `behind`: bytes that the caller has behind d.values + d.ld * d.room.
template <class T>
inline Digits room_for_digits(int slot, int64_t rows, int64_t k, int64_t group, int64_t unit, int64_t behind = 0) {
  Digits d{};
  d.k = ceil_div(k, 4) * 4;
  d.block = lesser(ceil_div(group, 4) * 4, kBlock);
  d.blocks = ceil_div(k, d.block);
  d.stride = ceil_div(d.block, unit) * unit;
  d.ld = unit > 4 ? d.blocks * d.stride : digits_length(d.blocks * d.stride);
  if (unit > 4) d.ld += unit / 2, rows += 16;  // no power of two, or rows would share a few sets of the cache; tiles load rows behind the last
  rows *= kDigits<T>;
  d.room = rows;
  d.values = static_cast<int16_t*>(thread_scratch(slot, sizeof(int16_t) * rows * d.ld + behind));
  d.scale = static_cast<float*>(thread_scratch(slot + 1, sizeof(float) * rows * d.blocks));
  d.sum = static_cast<int32_t*>(thread_scratch(slot + 2, sizeof(int32_t) * rows * d.blocks));
  return d;
}

#if defined(NPU_AMX)
// Row m's digits as tiles want them.
template <class T>
NPU_INLINE void split_row(const Digits& d, int64_t m) {
  for (int64_t i = m * kDigits<T>; i < (m + 1) * kDigits<T>; ++i) split_bytes(d.values + i * d.ld, d.blocks * d.stride);
}
#endif

#if defined(NPU_AMX)
// By tiles of bytes.
template <class T, class Source>
inline void integers_on_tiles(const WeightOnlyLinearParams& p, int64_t rows_a_piece, const Parallel& parallel) {
  const int64_t count = ceil_div(p.n, kColumns);
  const Digits d = room_for_digits<T>(kCallerSlots, p.m, p.k, p.group, kByteDepth);
  parallel(p.m, rows_a_piece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) digits_of_row<T>(d, i, static_cast<const T*>(p.x) + i * p.ldx, p.k, p.order), split_row<T>(d, i);
  });
  const int64_t together = p.m > 2 * kByteRows ? greater(1, lesser(kMostTogether, count / (2 * parallel.num_threads()))) : 1;
  const int64_t grain = together > 1 ? 1 : panels_a_piece(count, d.k / 4 * Source::kUnit, parallel);
  parallel(ceil_div(count, together), grain, [&](int64_t begin, int64_t end) {
    const Tiles tiles;
    for (int64_t i = begin; i < end; ++i) tile_panels<T, Source>(p, d, i * together, lesser(together, count - i * together));
  });
}
#endif

// x and weights as integers.
template <class T, class Source>
inline void integers(const WeightOnlyLinearParams& p, const Parallel& parallel) {
  const int64_t count = ceil_div(p.n, kColumns), rows_a_piece = greater(1, 16384 / greater(1, p.k));
#if defined(NPU_AMX)
  if (p.m * kDigits<T> > kTooFewForByteTiles) return integers_on_tiles<T, Source>(p, rows_a_piece, parallel);
#endif
  const Digits d = room_for_digits<T>(kCallerSlots, p.m, p.k, p.group, 4);
  parallel(p.m, rows_a_piece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) shared_digits_of_row<T>(d, i, static_cast<const T*>(p.x) + i * p.ldx, p.k, p.order);
  });
  const int64_t together = panels_at_a_time(p.m), grain = together > 1 ? 1 : panels_a_piece(count, d.k / 4 * Source::kUnit, parallel);
  parallel(ceil_div(count, together), grain, [&](int64_t begin, int64_t end) {
    all_panels<T, Source>(p, d, begin * together, lesser(end * together, count));
  });
}

template <class T, class Source>
inline void weight_only(const WeightOnlyLinearParams& p, const Parallel& parallel) {
#if defined(NPU_AVX512_BF16)
  if constexpr (__is_same(T, bf16))
    if (scales_weights(p.format, p.m, p.group)) return scaled_weights<Source>(p, parallel);
#if !defined(NPU_AMX)
  if constexpr (__is_same(T, bf16)) return weights_as_bf16<Source>(p, parallel);
#endif
#endif
#if defined(__AVX2__) && !defined(NPU_AVX512)
  if constexpr (__is_same(Source, Codes))
    if (floats_take(p)) return nvfp4_floats_by_rows<T>(p, parallel);
#endif
  if constexpr (__is_same(Source, E4m3Codes)) return e4m3_floats_by_rows<T>(p, parallel);
  else integers<T, Source>(p, parallel);
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
    case PanelFormat::nvfp4:
      return fn(Codes{});
    case PanelFormat::mxfp8:
      return fn(E4m3Codes{});
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
