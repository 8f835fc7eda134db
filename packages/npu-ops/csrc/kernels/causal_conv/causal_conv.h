// Causal convolution along a sequence, each channel for itself, over the last few tokens.
#pragma once

#include "vector/sequences.h"

namespace npu_ops {

constexpr int64_t kMaxConvWidth = 8;

struct CausalConvParams {
  void* y;             // [tokens, channels]
  const void* x;       // [tokens, channels], rows stride_x apart
  const void* weight;  // [channels, width], rows stride_weight apart; the last is the token's own
  const void* bias;    // [channels] or null
  void* state;         // [slots, channels, width - 1], any strides: the inputs before the next token, the oldest first
  Sequences sequences;
  int64_t channels, width, stride_x, stride_weight, stride_slot, stride_channel, stride_time;
  Dtype dtype, state_dtype;
  bool silu;
};

NPU_KERNEL(causal_conv1d, CausalConvParams)

}  // namespace npu_ops
