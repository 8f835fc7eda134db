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

// Gates and ups, weighed and with bias, become what the second product takes.
template <ExpertActivation A>
NPU_INLINE F activation_of(const ExpertsParams& p, F gate, F up) {
  const F low = set1(-p.limit), high = set1(p.limit);
  if (A == ExpertActivation::silu) gate = vmin(high, gate);  // in this order a NaN stays
  const F result = expert_gate<A>(p, gate);
  if (!p.gated) return result;
  if (A == ExpertActivation::silu) up = vmin(high, vmax(low, up)) + set1(p.beta);
  return result * up;
}

// Biases of an expert's columns [column, column + columns), as floats: of the gates, and of the ups.
template <class T>
NPU_INLINE void load_biases(const ExpertsParams& p, int64_t expert, int64_t column, int64_t columns, float* gates, float* ups) {
  const T* bias = static_cast<const T*>(p.bias13) + expert * (p.gated ? 2 : 1) * p.width;
  for (int64_t j = 0; j < columns; ++j) {
    gates[j] = to_float(bias[p.interleaved ? 2 * (column + j) : column + j]);
    if (p.gated) ups[j] = to_float(bias[p.interleaved ? 2 * (column + j) + 1 : p.width + column + j]);
  }
}

// The activation of one pair: y[0, columns) are gates and from up_at on ups, before weight and bias; kMost columns at most.
template <class T, ExpertActivation A, int64_t kMost>
inline void activate_pair(const ExpertsParams& p, int64_t expert, int64_t pair, int64_t column, int64_t columns, const float* y,
                          int64_t up_at, T* out) {
  const F scale = set1(p.weigh_input ? p.weights[pair] : 1.f);
  float biases[2][kMost];
  if (p.bias13) load_biases<T>(p, expert, column, columns, biases[0], biases[1]);
  for_vectors(columns, [&](int64_t j, auto n) {
    F gate = load_n(y + j, n) * scale, up = p.gated ? load_n(y + up_at + j, n) * scale : F{};
    if (p.bias13) gate += load_n(biases[0] + j, n);
    if (p.bias13 && p.gated) up += load_n(biases[1] + j, n);
    store_n(out + column + j, activation_of<A>(p, gate, up), n);
  });
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
