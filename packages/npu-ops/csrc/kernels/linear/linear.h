// y = x w^T + bias, with the weight rows as the checkpoint stores them: no packing, no second copy.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

struct LinearParams {
  const void* x;     // [m, k], rows ldx elements apart
  const void* w;     // [n, k], rows ldw elements apart
  const void* bias;  // [n] or null
  void* out;         // [m, n] contiguous
  int64_t m, n, k, ldx, ldw;
  Dtype dtype;
};

NPU_KERNEL(linear, LinearParams)
// Whether torch's own linear is the faster one for this shape.
NPU_IN_EACH_TIER(linear_prefers_torch, bool, const LinearParams&)

}  // namespace npu_ops
