// y = x w^T + bias with weights in 8-bit floats (e4m3), rows as the checkpoint stores them or panels, and x in floating point.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

struct Fp8LinearParams {
  const void* x;         // [m, k], rows ldx elements apart
  const uint8_t* w;      // [n, k], rows ldw elements apart, or in_panels; NaN encodings are not looked for
  const float* scale;    // [ceil(n / block_n), ceil(k / block_k)]
  const float* x_scale;  // [1], or null
  const void* bias;      // [n] or null
  void* out;             // [m, columns first to n], rows ldo elements apart
  int64_t m, n, k, ldx, ldo, ldw, first;
  int64_t block_n, block_k;  // block_k is at least k, or both are multiples of 32
  int64_t x_group;           // 0: x as it is; else rounded to e4m3 by x_scale, or by the range of each group of so many elements
  Dtype dtype;
  bool in_panels;  // w: [panels, ceil(k / 4), 128 bytes] of vector/panels.h. Scales' blocks and x_group are as weight_only_linear's group there
};

constexpr void leave_out(Fp8LinearParams& p, const Padding& padding) { p.m = padding.without(p.m); }

NPU_KERNEL(fp8_linear, Fp8LinearParams)

}  // namespace npu_ops
