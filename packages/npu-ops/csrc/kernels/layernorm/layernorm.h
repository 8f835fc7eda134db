// RMS norm, with or without adding the residual first: y = x / sqrt(mean(x^2) + eps) * w.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

// Rows are indexed [outer][inner]; x may be strided, residual and out are contiguous.
struct NormParams {
  const void* x;
  void* residual;      // null: plain norm. Else x + residual is normed, and stored here
  const void* weight;  // [width], null: ones
  void* out;
  int64_t outer, inner, width;
  int64_t stride_outer, stride_inner;
  float eps;
  Dtype dtype, weight_dtype;
  // Gemma: weight + 1, in float
  bool gemma;
};

constexpr void leave_out(NormParams& p, const Padding& padding) {
  if (p.outer == 1) p.inner = padding.without(p.inner);  // else rows of heads
}

NPU_KERNEL(norm, NormParams)

}  // namespace npu_ops
