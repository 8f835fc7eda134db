// Experts with weights of 4 or 8 bits in panels, and x in floating point: weight_only_linear's formats.
#pragma once

#include "kernels/moe/moe.h"
#include "kernels/weight_only_linear/weight_only_linear.h"

namespace npu_ops {

// One projection of all experts. Gate and up lie one behind the other, each in whole panels.
struct PanelExperts {
  const uint8_t* w;      // [experts, panels, ceil(k / 4), 64 or 128 bytes]
  const void* scales;    // [experts, panels, groups, 32]; of nvfp4 as weight_only_linear's
  const int8_t* zeros;   // like scales, or null
  int64_t panels, k, group;
};

struct WeightOnlyExpertsParams {
  ExpertsParams experts;
  PanelExperts passes[2];  // gate and up; down
  PanelFormat format;
  Dtype scale_dtype;
};

constexpr void leave_out(WeightOnlyExpertsParams& p, const Padding& padding) { p.experts.tokens = padding.without(p.experts.tokens); }

NPU_KERNEL(weight_only_experts, WeightOnlyExpertsParams)

}  // namespace npu_ops
