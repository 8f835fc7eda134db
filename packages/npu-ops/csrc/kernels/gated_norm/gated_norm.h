// RMS norm beside a gate: norm(x) * w * act(gate), or norm(x * act(gate)) * w, over groups of a row.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

struct GatedNormParams {
  void* out;           // [rows, width]
  const void* x;       // [outer, inner, width], strides
  const void* gate;    // [outer, inner, width], strides
  const void* weight;  // [width]
  int64_t outer, inner, width, group;
  int64_t stride_outer, stride_inner, gate_stride_outer, gate_stride_inner;
  float eps;
  Dtype dtype, weight_dtype;
  bool norm_first, sigmoid;
};

NPU_KERNEL(gated_rms_norm, GatedNormParams)

}  // namespace npu_ops
