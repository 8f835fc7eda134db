// y = x w^T + bias with weights of 4 or 8 bits, in the panels of vector/panels.h, and x in floating point.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

enum class PanelFormat : int { int4, int8, mxfp4, nvfp4, mxfp8 };  // e2m1 as vector/panels.h orders it with scales of e8m0 and of e4m3; e4m3 with those of e8m0
constexpr bool is_integer(PanelFormat format) { return format == PanelFormat::int4 || format == PanelFormat::int8; }
constexpr bool is_e2m1(PanelFormat format) { return format == PanelFormat::mxfp4 || format == PanelFormat::nvfp4; }
constexpr int64_t kFactorRows = 4;  // of 32 bytes, before the scales of a panel of nvfp4: the floats that its columns' scales are multiplied by

struct WeightOnlyLinearParams {
  const void* x;         // [m, k], rows ldx elements apart
  const uint8_t* w;      // [panels, ceil(k / 4), 64 or 128 bytes]
  const void* scales;    // [panels, groups, 32]; of mxfp4 and mxfp8: uint8, e8m0; of nvfp4: e4m3, [panels, kFactorRows + groups, 32 bytes]
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
