// Greedy choice, and the top-k / top-p masks without a sort.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

struct ArgmaxParams {
  const void* logits;  // [rows, width], rows `stride` apart
  int64_t* out;        // [rows]
  int64_t rows, width, stride;
  Dtype dtype;
};

struct TopKTopPParams {
  float* logits;  // [rows, width], rows `stride` apart
  const void* k;  // [rows] or null
  bool k_is_32_bit;
  const float* p;  // [rows] or null
  int64_t rows, width, stride;
};

NPU_KERNEL(argmax, ArgmaxParams)
NPU_KERNEL(top_k_top_p, TopKTopPParams)

}  // namespace npu_ops
