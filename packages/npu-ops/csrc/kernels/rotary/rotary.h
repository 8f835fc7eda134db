// Rotary position embedding in place, on query and key.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

struct RotaryParams {
  const int64_t* positions;  // [tokens], or [3][tokens] for multimodal sections
  int64_t positions_stride;  // between the three rows
  void* query;
  void* key;  // null: query only
  int64_t tokens, query_heads, key_heads, head_size, rotary_dim;
  int64_t query_stride, key_stride;            // between tokens
  int64_t query_head_stride, key_head_stride;  // between heads
  const void* cos_sin;                         // [positions][rotary_dim]: cosines, then sines
  int64_t cos_sin_stride, cos_sin_rows;
  Dtype dtype, cache_dtype;
  bool neox;               // pairs (i, i + half); else (2i, 2i + 1)
  int32_t sections[3];     // multimodal: channels of time, height, width; all 0: plain
  bool sections_interleaved;
};

constexpr void leave_out(RotaryParams& p, const Padding& padding) { p.tokens = padding.without(p.tokens); }

NPU_KERNEL(rotary, RotaryParams)

}  // namespace npu_ops
