// Layer norm: y = (x - mean) / sqrt(variance + eps) * w + b.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

struct CenteredNormParams {
  const void* x;                 // rows `stride` apart
  const void *weight, *bias;     // [width] of one dtype, or null
  void* out;                     // [rows, width]
  int64_t rows, width, stride;
  float eps;
  bool plus_one;  // weight + 1
  Dtype dtype, weight_dtype;
};

NPU_KERNEL(centered_norm, CenteredNormParams)

}  // namespace npu_ops
