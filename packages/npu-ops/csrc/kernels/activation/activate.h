// The formulas of the activations, a vector at a time.
#pragma once

#include "kernels/activation/activation.h"
#include "vector/vec.h"

namespace npu_ops {
namespace {

template <Activation A>
NPU_INLINE F activate(F x) {
  constexpr float kLog2e = 1.44269504088896341f;
  if constexpr (A == Activation::silu) return x / (set1(1.f) + vexp2(x * set1(-kLog2e)));
  if constexpr (A == Activation::quick_gelu) return x / (set1(1.f) + vexp2(x * set1(-1.702f * kLog2e)));
  if constexpr (A == Activation::gelu_erf) return set1(0.5f) * x * (set1(1.f) + verf(x * set1(0.70710678118654752f)));
  if constexpr (A == Activation::gelu_tanh) {
    // x (1 + tanh(z)) / 2 = x / (1 + e^-2z)
    const F z = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
    return x / (set1(1.f) + vexp2(z * set1(-2.f * kLog2e)));
  }
  F r = vmax(x, F{});
  return r * r;
}

}  // namespace
}  // namespace npu_ops
