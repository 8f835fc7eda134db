// Experts with weights of 8 bits in panels, and x rounded to 8 bits by token: int8_linear's symmetric format.
#pragma once

#include "kernels/int8_linear/int8_linear.h"
#include "kernels/moe/moe.h"

namespace npu_ops {

// One projection of all experts. Gate and up lie one behind the other, each in whole panels.
struct Int8Experts {
  const uint8_t* w;    // [experts, panels, ceil(k / 4), 128 bytes]
  const float* scale;  // [experts, panels * 32]
  int64_t panels, k;
};

struct Int8ExpertsParams {
  ExpertsParams experts;
  Int8Experts passes[2];  // gate and up; down
};

constexpr void leave_out(Int8ExpertsParams& p, const Padding& padding) { p.experts.tokens = padding.without(p.experts.tokens); }

NPU_KERNEL(int8_experts, Int8ExpertsParams)

}  // namespace npu_ops
