// Activations, plain or gated: out = act(x[:d]) * x[d:].
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

enum class Activation : int { silu, gelu_erf, gelu_tanh, quick_gelu, relu2 };

struct ActivationParams {
  const void* x;  // rows `stride` apart
  void* out;      // contiguous
  int64_t rows, width, stride;
  Dtype dtype;
  Activation kind;
  bool gated;  // rows of 2 * width: gate, then up
};

constexpr void leave_out(ActivationParams& p, const Padding& padding) { p.rows = padding.without(p.rows); }

NPU_KERNEL(activation, ActivationParams)

}  // namespace npu_ops
