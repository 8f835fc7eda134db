// Body of the 8-bit kernels, compiled once a tier: rows of x widened to 16 bits, products of pairs, sums exact in 32 bits.
#pragma once

#include "kernels/int8_linear/int8_linear.h"
#include "vector/panels.h"

namespace npu_ops::NPU_TIER {
namespace {

constexpr int64_t kBlock = 256;             // elements of k that are unpacked at a time
constexpr int64_t kDirectRows = kTileRows;  // up to here each tile unpacks the weights by itself
constexpr int64_t kPanelsAtATime = 2;

// Adds a block's sums to c, [rows][4 vectors].
struct Summed {
  int32_t* c;
  NPU_INLINE I start(int64_t row, int j) const { return load_raw<I>(c + (row * kVectors + j) * W); }
  template <int V>
  NPU_INLINE void add(int64_t row, int first, const I (&sums)[V]) const {
    memcpy(c + (row * kVectors + first) * W, sums, sizeof sums);
  }
};

// Rows of x as 16-bit integers, k padded to whole units.
inline int16_t* widened(const Int8LinearParams& p, int64_t ld, const Parallel& parallel) {
  int16_t* x = static_cast<int16_t*>(thread_scratch(kCallerSlots, sizeof(int16_t) * p.m * ld));
  parallel(p.m, greater(1, 65536 / greater(1, p.k)), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      for (int64_t k = 0; k < ld; ++k) x[m * ld + k] = k < p.k ? p.x[m * p.ldx + k] : 0;
  });
  return x;
}

// Row m of the result, 32 columns from n on.
template <class T>
NPU_INLINE void store_exact(const Int8LinearParams& p, const I (&sums)[kSums], int64_t m, int64_t n) {
  float y[kColumns];
  for (int j = 0; j < kSums; ++j) {
    I exact = sums[j];
    if (p.x_zero) exact -= (p.x_zero[m * p.x_scale_step] - I{}) * load_raw<I>(p.w_sum + n + j * W);
    store(y + j * W, to_floats(exact) * (load(p.w_scale + n + j * W) * set1(p.x_scale[m * p.x_scale_step])));
  }
  store_columns(static_cast<T*>(p.out) + m * p.ldo + n, p.bias ? static_cast<const T*>(p.bias) + n : nullptr, y, lesser(kColumns, p.n - n));
}

}  // namespace
}  // namespace npu_ops::NPU_TIER

#if defined(NPU_AMX)
#include "kernels/int8_linear/tiles.inc"
#elif defined(NPU_AVX512)
#include "kernels/int8_linear/bytes.inc"
#endif

namespace npu_ops::NPU_TIER {
namespace {

template <class T>
inline void panels(const Int8LinearParams& p, const int16_t* x, int64_t ld, int64_t first, int64_t count) {
  const int64_t row_sums = kVectors * W;
  int32_t* c = static_cast<int32_t*>(thread_scratch(1, sizeof(int32_t) * count * p.m * row_sums));
  memset(c, 0, sizeof(int32_t) * count * p.m * row_sums);
  int16_t* unpacked = static_cast<int16_t*>(thread_scratch(2, sizeof(int16_t) * count * kBlock * kColumns));
  const bool direct = p.m <= kDirectRows;
  for (int64_t k = 0; k < ld; k += direct ? ld : kBlock) {
    const int64_t steps = lesser(direct ? ld : kBlock, ld - k) / kStep;
    for (int64_t i = 0; i < count; ++i) {
      const Bytes w{p.w + ((first + i) * ld + k) / 4 * Bytes::kUnit};
      if (direct)
        block_rows(Summed{c + i * p.m * row_sums}, w, x, ld, p.m, steps);
      else
        unpack_block(unpacked + i * kBlock * kColumns, w, steps);
    }
    if (direct) continue;
    const int64_t tiles = ceil_div(p.m, kTileRows);
    for (int64_t t = 0; t < tiles; ++t)
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = t * p.m / tiles;
        tile<kTileRows>((t + 1) * p.m / tiles - row, Summed{c + i * p.m * row_sums}, Unpacked{unpacked + i * kBlock * kColumns}, x + k, ld, row, steps);
      }
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t m = 0; m < p.m; ++m) {
      I sums[kVectors], exact[kSums];
      memcpy(sums, c + (i * p.m + m) * row_sums, sizeof sums);
      by_column(exact, sums);  // one sum a column before it is rounded to float
      store_exact<T>(p, exact, m, (first + i) * kColumns);
    }
}

template <class T>
inline void some_rows(const Int8LinearParams& p, const Parallel& parallel) {
#if defined(NPU_AVX512) && !defined(NPU_AMX)
  int8_linear_bytes<T>(p, parallel);
#else
#if defined(NPU_AMX)
  if (p.m > kTooFewForTiles8) return int8_linear_tiles<T>(p, parallel);
#endif
  const int64_t ld = ceil_div(p.k, 4) * 4, count = ceil_div(p.n, kColumns);
  const int16_t* x = widened(p, ld, parallel);
  const int64_t together = p.m > 16 ? kPanelsAtATime : 1;
  const int64_t grain = p.m > 16 ? 1 : panels_a_piece(count, ld * kColumns, parallel);
  parallel(ceil_div(count, together), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) panels<T>(p, x, ld, i * together, lesser(together, count - i * together));
  });
#endif
}

template <class T>
inline void int8_linear_of(const Int8LinearParams& p, const Parallel& parallel) {
  in_parts(p.m, [&](int64_t first, int64_t count) {
    Int8LinearParams part = p;
    part.x = p.x + first * p.ldx;
    part.x_scale = p.x_scale + first * p.x_scale_step;
    part.x_zero = p.x_zero ? p.x_zero + first * p.x_scale_step : nullptr;
    part.out = static_cast<T*>(p.out) + first * p.ldo;
    part.m = count;
    some_rows<T>(part, parallel);
  });
}

// ---- x to 8 bits ----

struct Range {
  F low, high;
  I magnitude;  // NaN if there is one
};
template <class T>
NPU_INLINE Range range_of(const T* x, int64_t n) {
  // zero is in the range: lanes past the end read as that
  Range r{};
  for_vectors(n, [&](int64_t i, auto left) {
    F v = load_n(x + i, left);
    r.low = vmin(v, r.low);
    r.high = vmax(v, r.high);
    r.magnitude = larger_magnitude(r.magnitude, v);
  });
  return r;
}

// Lanes between -128 and 127 as bytes.
NPU_INLINE void store_bytes(int8_t* p, I v, int64_t n) {
  int8_t bytes[W];
#if defined(NPU_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(bytes), _mm_packs_epi16(words, words));
#else
  for (int j = 0; j < W; ++j) bytes[j] = static_cast<int8_t>(v[j]);
#endif
  memcpy(p, bytes, n);
}
NPU_INLINE void store_bytes(int8_t* p, I v, Whole) { store_bytes(p, v, W); }

// int8 has no NaN: a token that holds one has the scale NaN, and so NaN for all its results. With a given scale NaN becomes -128.
template <class T>
inline void quantize_row(const Int8QuantParams& p, int64_t m) {
  const T* x = static_cast<const T*>(p.x) + m * p.ldx;
  float scale;
  int32_t zero = 0;
  if (p.is_static) {
    scale = p.scale[0];
    zero = p.zero ? p.zero[0] : 0;
  } else {
    const Range r = range_of(x, p.k);
    const float low = -highest(-r.low), high = highest(r.high), most = largest_magnitude(r.magnitude);
    if (p.zero) {
      scale = most == most ? (high - low) / 255.f : most;
      zero = scale > 0 ? static_cast<int32_t>(__builtin_rintf(-128.f - low / scale)) : 0;
      p.zero[m] = zero;
    } else {
      scale = most / 127.f;
    }
    p.scale[m] = scale;
  }
  const float inverse = scale > 0 ? 1.f / scale : 0.f;
  const I shift = zero - I{};
  int8_t* out = p.out + m * p.k;
  for_vectors(p.k, [&](int64_t i, auto left) {
    // limited as floats first: an integer conversion of what is too large is undefined
    F v = vmin(vmax(load_n(x + i, left) * set1(inverse), set1(-65536.f)), set1(65536.f));
    I q = limited(rounded(v) + shift, -128, 127);
    store_bytes(out + i, q, left);
  });
}

template <class T>
inline void quantize(const Int8QuantParams& p, const Parallel& parallel) {
  parallel(p.m, greater(1, 16384 / greater(1, p.k)), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) quantize_row<T>(p, m);
  });
}

template <class T>
inline void quantized_linear(const Int8DynamicLinearParams& d, const Parallel& parallel) {
  Int8LinearParams p = d.linear;
  int8_t* x = static_cast<int8_t*>(thread_scratch(kCallerSlots + 1, p.m * p.k));
  float* scale = static_cast<float*>(thread_scratch(kCallerSlots + 2, sizeof(float) * p.m));
  int32_t* zero = d.symmetric ? nullptr : static_cast<int32_t*>(thread_scratch(kCallerSlots + 3, sizeof(int32_t) * p.m));
  quantize<T>({d.x, x, scale, zero, p.m, p.k, d.ldx, false, p.dtype}, parallel);
  p.x = x, p.ldx = p.k, p.x_scale = scale, p.x_zero = zero, p.x_scale_step = 1;
  int8_linear_of<T>(p, parallel);
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
