// Body of the 8-bit kernels, compiled once a tier: how x becomes 8 bits, and what a tier's products have in common.
#pragma once

#include "kernels/int8_linear/int8_linear.h"
#include "vector/panels.h"

namespace npu_ops::NPU_TIER {
namespace {

// What the exact sums of row m, a vector of columns from n on, stand for; without bias.
NPU_INLINE F scaled(const Int8LinearParams& p, I exact, int64_t m, int64_t n) {
  if (p.x_zero) exact -= (p.x_zero[m * p.x_scale_step] - I{}) * load_raw<I>(p.w_sum + n);
  return to_floats(exact) * (load(p.w_scale + n) * set1(p.x_scale[m * p.x_scale_step]));
}

// Row m of the result, 32 columns from n on.
template <class T>
NPU_INLINE void store_exact(const Int8LinearParams& p, const I (&sums)[kSums], int64_t m, int64_t n) {
  float y[kColumns];
  for (int j = 0; j < kSums; ++j) store(y + j * W, scaled(p, sums[j], m, n + j * W));
  store_columns(static_cast<T*>(p.out) + m * p.ldo + n, p.bias ? static_cast<const T*>(p.bias) + n : nullptr, y, lesser(kColumns, p.n - n));
}

}  // namespace
}  // namespace npu_ops::NPU_TIER

#if defined(NPU_AMX)
#include "kernels/int8_linear/tiles.inc"
#elif defined(NPU_AVX512)
#include "kernels/int8_linear/bytes.inc"
#else
#include "kernels/int8_linear/pairs.inc"
#endif

namespace npu_ops::NPU_TIER {
namespace {

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
      zero = scale > 0 && scale < __builtin_inff() ? static_cast<int32_t>(__builtin_rintf(-128.f - low / scale)) : 0;
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
