// Low-rank adapters, another one for each token: y += scale * (x A^T) B^T.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

constexpr int kLoraSlices = 8;

// One of the outputs that lie side by side in y, such as those of q, k and v.
struct LoraSlice {
  const void* weight;  // [adapters, rows, k]
  int64_t rows, stride_adapter, stride_row;
  int64_t column;  // its first in y
};

struct LoraShrinkParams {
  float* y;                // [slices, tokens, rank]
  const void* x;           // [tokens, hidden], rows stride_x apart
  const int64_t* indices;  // [tokens]: adapter of each, -1: none, its row of y becomes zero
  LoraSlice slices[kLoraSlices];
  int64_t num_slices, tokens, hidden, adapters, stride_x, stride_y_slice, stride_y;
  float scale;
  Dtype dtype;
};

struct LoraExpandParams {
  void* y;                 // [tokens, columns], rows stride_y apart
  const float* x;          // [slices, tokens, rank]
  const int64_t* indices;  // [tokens]: adapter of each, -1: none, its row of y stays
  LoraSlice slices[kLoraSlices];
  int64_t num_slices, tokens, rank, adapters, stride_y, stride_x_slice, stride_x;
  Dtype dtype;
  bool add;  // to what y holds
};

NPU_KERNEL(lora_shrink, LoraShrinkParams)
NPU_KERNEL(lora_expand, LoraExpandParams)

}  // namespace npu_ops
