// y = x w^T + bias with weights and x of 8 bits, and how x becomes 8 bits. Weights in the panels of vector/panels.h.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

// Sums are exact in 32 bits and scaled at the end: y = (sum - x_zero * w_sum) * x_scale * w_scale + bias.
struct Int8LinearParams {
  const int8_t* x;         // [m, k], rows ldx elements apart
  const float* x_scale;    // [m], or [1] when x_scale_step is 0
  const int32_t* x_zero;   // like x_scale, or null
  const uint8_t* w;        // [panels, ceil(k / 4), 128 bytes]
  const float* w_scale;    // [panels * 32]
  const int32_t* w_sum;    // [panels * 32]: sums of the weights along k; read with x_zero only
  const void* bias;        // [n] or null
  void* out;               // [m, n], rows ldo elements apart
  int64_t m, n, k, ldx, ldo, x_scale_step;
  Dtype dtype;
};

// x to 8 bits: q = clamp(round(x / scale) + zero).
struct Int8QuantParams {
  const void* x;        // [m, k], rows ldx elements apart
  int8_t* out;          // [m, k] contiguous
  float* scale;         // dynamic: written, [m]; static: read, [1]
  int32_t* zero;        // like scale; null: symmetric
  int64_t m, k, ldx;
  bool is_static;
  Dtype dtype;
};

// Both at once: each row of x by its own range. linear's x, x_scale and x_zero are not read.
struct Int8DynamicLinearParams {
  Int8LinearParams linear;
  const void* x;  // [m, k], rows ldx elements apart
  int64_t ldx;
  bool symmetric;
};

constexpr void leave_out(Int8LinearParams& p, const Padding& padding) { p.m = padding.without(p.m); }
constexpr void leave_out(Int8DynamicLinearParams& p, const Padding& padding) { leave_out(p.linear, padding); }
constexpr void leave_out(Int8QuantParams& p, const Padding& padding) { p.m = padding.without(p.m); }

NPU_KERNEL(int8_linear, Int8LinearParams)
NPU_KERNEL(int8_linear_dynamic, Int8DynamicLinearParams)
NPU_KERNEL(int8_quant, Int8QuantParams)

}  // namespace npu_ops
