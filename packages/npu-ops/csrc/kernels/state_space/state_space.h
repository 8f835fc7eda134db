// Layers whose memory of a sequence is a state of fixed size: Mamba-1, Mamba-2, the gated delta rule.
#pragma once

#include "vector/sequences.h"

namespace npu_ops {

// h = exp(dt A) h + dt x B^T; y = h C + D x, for each head; dt = softplus(dt + bias).
// Mamba-1 is the case of heads of one channel whose decay differs along the state.
struct SelectiveScanParams {
  void* y;          // [tokens, heads, width], rows stride_y apart
  const void* x;    // [tokens, heads, width], rows stride_x apart
  const void* dt;   // Mamba-2: [tokens, heads]; Mamba-1: [tokens, width]; rows stride_dt apart
  const float* a;   // Mamba-2: [heads]; Mamba-1: [width, size]
  const void* b;    // [tokens, groups, size], rows stride_b apart
  const void* c;    // [tokens, groups, size], rows stride_c apart
  const void* d;    // [heads], Mamba-1: [width]; or null
  const void* dt_bias;  // [heads], Mamba-1: [width]; or null
  const void* z;    // gate, as x, rows stride_z apart; or null
  void* state;      // [slots, heads, width, size], slots stride_slot apart
  Sequences sequences;
  int64_t heads, width, groups, size, stride_y, stride_x, stride_dt, stride_b, stride_c, stride_z, stride_slot;
  Dtype dtype, state_dtype, d_dtype, bias_dtype;
  bool by_channel;  // Mamba-1
};

// S = g S; S += beta (v - S k) k^T; o = S q, for each value head, with g = exp(-exp(a_log) softplus(a + dt_bias)), beta = sigmoid(b),
// and q and k of length one, q divided by the root of its size.
struct GatedDeltaRuleParams {
  void* out;         // [tokens, value_heads, value_size]
  const void* qkv;   // [tokens, key_heads * key_size * 2 + value_heads * value_size], rows stride_qkv apart
  const void* a;     // [tokens, value_heads], rows stride_a apart
  const void* b;     // [tokens, value_heads], rows stride_b apart
  const void* a_log;    // [value_heads]
  const void* dt_bias;  // [value_heads]
  void* state;       // [slots, value_heads, value_size, key_size], slots stride_slot apart
  Sequences sequences;
  int64_t key_heads, value_heads, key_size, value_size, stride_out, stride_qkv, stride_a, stride_b, stride_slot;
  Dtype dtype, state_dtype, a_log_dtype, bias_dtype;
};

NPU_KERNEL(selective_scan, SelectiveScanParams)
NPU_KERNEL(gated_delta_rule, GatedDeltaRuleParams)

}  // namespace npu_ops
