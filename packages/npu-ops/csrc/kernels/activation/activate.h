// The formulas of the activations, a vector at a time.
#pragma once

#include "kernels/activation/activation.h"
#include "vector/vec.h"

namespace npu_ops {
namespace {

// 2^(x y) for products between -127 and 128, or NaN; relative error below 2e-7. Minimax polynomial of degree 5.
NPU_INLINE F vexp2_of_product(F x, F y) {
  const F shift = set1(12582912.f + 127.f);  // as in power_of_two
  const F moved = fma(x, y, shift);
  return exp2_of_fraction(fma(x, y, shift - moved)) * from_bits(bits_of(moved) << 23);
}

// 2^(scale x); 0 below -127, infinity above 127.5, NaN stays.
NPU_INLINE F vexp2_of(F x, float scale) {
  const float low = scale > 0 ? -127.f / scale : 128.f / scale, high = scale > 0 ? 128.f / scale : -127.f / scale;
  return vexp2_of_product(clamped(x, low, high), set1(scale));
}

// x / (1 + e^-zx)
NPU_INLINE F swish(F x, float z) { return x / (set1(1.f) + vexp2_of(x, -1.44269504088896341f * z)); }

template <Activation A>
NPU_INLINE F activate(F x) {
  if constexpr (A == Activation::silu) return swish(x, 1.f);
  if constexpr (A == Activation::quick_gelu) return swish(x, 1.702f);
  if constexpr (A == Activation::gelu_erf) return set1(0.5f) * x * (set1(1.f) + verf(x * set1(0.70710678118654752f)));
  if constexpr (A == Activation::gelu_tanh) {
    // x (1 + tanh(z)) / 2 = x / (1 + e^-2z); beyond the bounds of `y` the power of two would not be one
    const F y = clamped(x, -10.07f, 10.04f);
    const F scale = fma(y * y, set1(-0.10294324f), set1(-2.3022082f));
    return x / (set1(1.f) + vexp2_of_product(y, scale));
  }
  F r = vmax(F{}, x);  // NaN stays
  return r * r;
}

// As rounded_to, with ties away from zero, which is cheaper.
template <class T>
NPU_INLINE F roughly_rounded_to(F x, T* type) {
  return rounded_to(x, type);
}
NPU_INLINE F roughly_rounded_to(F x, bf16*) { return from_bits((bits_of(x) + 0x8000u) & 0xffff0000u); }

// The activation as a T. What is computed with an error meets no ties but among subnormal numbers.
template <Activation A, class T>
NPU_INLINE F activated(F x, T* type) {
  if constexpr (A == Activation::relu2) return rounded_to(activate<A>(x), type);
  return roughly_rounded_to(activate<A>(x), type);
}

}  // namespace
}  // namespace npu_ops
