// The formulas of the activations, a vector at a time.
#pragma once

#include "kernels/activation/activation.h"
#include "vector/vec.h"

namespace npu_ops {
namespace {

template <Activation A>
NPU_INLINE F activate(F x) {
  if constexpr (A == Activation::silu) return x / (set1(1.f) + vexp(-x));
  if constexpr (A == Activation::quick_gelu) return x / (set1(1.f) + vexp(x * set1(-1.702f)));
  if constexpr (A == Activation::gelu_erf) return set1(0.5f) * x * (set1(1.f) + verf(x * set1(0.70710678118654752f)));
  if constexpr (A == Activation::gelu_tanh) {
    F inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
    return set1(0.5f) * x * (set1(1.f) + vtanh(inner));
  }
  F r = vmax(x, F{});
  return r * r;
}

}  // namespace
}  // namespace npu_ops
