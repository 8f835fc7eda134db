// Body of the RMS norm kernels, compiled once a tier.
#pragma once

#include "kernels/layernorm/layernorm.h"
#include "vector/vec.h"

namespace npu_ops::NPU_TIER {
namespace {

template <class T, class Wt, bool Gemma>
NPU_INLINE F scale_weight(F y, F w, T* tag) {
  if constexpr (Gemma) return y * (w + set1(1.f));
  // a weight of x's own narrow type multiplies the rounded value, as vLLM's native norm does
  if constexpr (sizeof(T) == sizeof(Wt)) return rounded_to(y, tag) * w;
  return y * w;
}

// Sum of squares; with a residual, of x + residual before it is rounded, which is left in `sums`.
template <class T>
inline float squares(const T* x, T* residual, int64_t width, float* sums) {
  F acc = {}, other = {};
  if (!residual) {
    for_pairs(
        width,
        [&](int64_t i) {
          const Pair v = load_pair(x + i);
          acc = fma(v.a, v.a, acc);
          other = fma(v.b, v.b, other);
        },
        [&](int64_t i, int64_t n) {
          const F a = load_n(x + i, n);
          acc = fma(a, a, acc);
        });
    return sum(acc + other);
  }
  for_pairs(
      width,
      [&](int64_t i) {
        const Pair v = load_pair(x + i), r = load_pair(residual + i), y = {v.a + r.a, v.b + r.b};
        store_pair(residual + i, y);
        store_pair(sums + i, y);
        acc = fma(y.a, y.a, acc);
        other = fma(y.b, y.b, other);
      },
      [&](int64_t i, int64_t n) {
        const F a = load_n(x + i, n) + load_n(residual + i, n);
        store_n(residual + i, a, n);
        store(sums + i, a);
        acc = fma(a, a, acc);
      });
  return sum(acc + other);
}

// out = from * inv * weight. `from` is x itself, or the sums, whose pairs lie in the order of T's.
template <class T, class Wt, bool Gemma, class From>
inline void scale_row(const From* from, const Wt* w, T* out, F inv, int64_t width) {
  const auto tag = static_cast<T*>(nullptr);
  for_pairs(
      width,
      [&](int64_t i) {
        const Pair v = load_pair(from + i), y = {v.a * inv, v.b * inv};
        if (!w) return store_pair(out + i, y);
        const Pair u = load_pair_like(w + i, tag);
        store_pair(out + i, {scale_weight<T, Wt, Gemma>(y.a, u.a, tag), scale_weight<T, Wt, Gemma>(y.b, u.b, tag)});
      },
      [&](int64_t i, int64_t n) {
        const F y = load_n(from + i, n) * inv;
        store_n(out + i, w ? scale_weight<T, Wt, Gemma>(y, load_n(w + i, n), tag) : y, n);
      });
}

template <class T, class Wt, bool Gemma>
inline void norm_row(const NormParams& p, const T* x, T* residual, T* out, float* sums) {
  const Wt* w = static_cast<const Wt*>(p.weight);
  const F inv = set1(1.f / __builtin_sqrtf(squares(x, residual, p.width, sums) / static_cast<float>(p.width) + p.eps));
  if (residual)
    scale_row<T, Wt, Gemma>(sums, w, out, inv, p.width);
  else
    scale_row<T, Wt, Gemma>(x, w, out, inv, p.width);
}

template <class T, class Wt>
inline void norm_rows(const NormParams& p, const Parallel& parallel) {
  const int64_t rows = p.outer * p.inner;
  const int64_t grain = greater(1, 16384 / greater(1, p.width));
  parallel(rows, grain, [&](int64_t begin, int64_t end) {
    float* sums = static_cast<float*>(thread_scratch(0, sizeof(float) * (p.width + 2 * W)));
    for (int64_t r = begin; r < end; ++r) {
      const T* x = static_cast<const T*>(p.x) + (r / p.inner) * p.stride_outer + (r % p.inner) * p.stride_inner;
      T* residual = p.residual ? static_cast<T*>(p.residual) + r * p.width : nullptr;
      T* out = static_cast<T*>(p.out) + r * p.width;
      if (p.gemma)
        norm_row<T, Wt, true>(p, x, residual, out, sums);
      else
        norm_row<T, Wt, false>(p, x, residual, out, sums);
    }
  });
}

template <class T>
inline void norm_any_weight(const NormParams& p, const Parallel& parallel) {
  switch (p.weight_dtype) {
    case Dtype::bf16:
      return norm_rows<T, bf16>(p, parallel);
    case Dtype::fp16:
      return norm_rows<T, fp16>(p, parallel);
    case Dtype::fp32:
      return norm_rows<T, float>(p, parallel);
  }
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
