// y = x w^T + bias with weights of 4 or 8 bits, in the panels of vector/panels.h, and x in floating point.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

enum class PanelFormat : int { int4, int8, mxfp4 };  // mxfp4: e2m1 as vector/panels.h orders it, with e8m0 scales

struct WeightOnlyLinearParams {
  const void* x;         // [m, k], rows ldx elements apart
  const uint8_t* w;      // [panels, ceil(k / 4), 64 or 128 bytes]
  const void* scales;    // [panels, groups, 32]; of mxfp4: uint8, e8m0
  const int8_t* zeros;   // [panels, groups, 32]; null: symmetric (8 for int4, 0 for int8)
  const int32_t* order;  // [k]: the element of x that the weights' i-th meets; null: as they come
  const void* bias;      // [n] or null
  void* out;             // [m, n], rows ldo elements apart
  int64_t m, n, k, ldx, ldo;
  int64_t group;  // elements of k that share a scale: a divisor of 128, a multiple of 128, or at least k
  PanelFormat format;
  Dtype dtype, scale_dtype;
};

constexpr void leave_out(WeightOnlyLinearParams& p, const Padding& padding) { p.m = padding.without(p.m); }

NPU_KERNEL(weight_only_linear, WeightOnlyLinearParams)

}  // namespace npu_ops
