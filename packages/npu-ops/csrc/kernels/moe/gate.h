// What stands between an expert's two products.
#pragma once

#include "kernels/activation/activate.h"
#include "kernels/moe/moe.h"

namespace npu_ops::NPU_TIER {
namespace {

template <ExpertActivation A>
NPU_INLINE F expert_gate(const ExpertsParams& p, F gate) {
  if constexpr (A == ExpertActivation::silu) return gate / (set1(1.f) + vexp(gate * set1(-p.alpha)));
  if constexpr (A == ExpertActivation::gelu_erf) return activate<Activation::gelu_erf>(gate);
  if constexpr (A == ExpertActivation::gelu_tanh) return activate<Activation::gelu_tanh>(gate);
  return activate<Activation::relu2>(gate);
}

// The activation of one pair: y[0, columns) are gates and from up_at on ups, before weight and bias; kMost columns at most.
template <class T, ExpertActivation A, int64_t kMost>
inline void activate_pair(const ExpertsParams& p, int64_t expert, int64_t pair, int64_t column, int64_t columns, const float* y,
                          int64_t up_at, T* out) {
  const F scale = set1(p.weigh_input ? p.weights[pair] : 1.f), low = set1(-p.limit), high = set1(p.limit);
  const T* bias = p.bias13 ? static_cast<const T*>(p.bias13) + expert * (p.gated ? 2 : 1) * p.width : nullptr;
  float biases[2][kMost];
  for (int64_t j = 0; bias && j < columns; ++j) {
    biases[0][j] = to_float(bias[p.interleaved ? 2 * (column + j) : column + j]);
    if (p.gated) biases[1][j] = to_float(bias[p.interleaved ? 2 * (column + j) + 1 : p.width + column + j]);
  }
  for_vectors(columns, [&](int64_t j, auto n) {
    F gate = load_n(y + j, n) * scale;
    if (bias) gate += load_n(biases[0] + j, n);
    if (A == ExpertActivation::silu) gate = vmin(high, gate);  // in this order a NaN stays
    F result = expert_gate<A>(p, gate);
    if (p.gated) {
      F up = load_n(y + up_at + j, n) * scale;
      if (bias) up += load_n(biases[1] + j, n);
      if (A == ExpertActivation::silu) up = vmin(high, vmax(low, up)) + set1(p.beta);
      result *= up;
    }
    store_n(out + column + j, result, n);
  });
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
