// What an attention layer does between its projection and attention: norm of the heads, rotation, write into the cache.
#pragma once

#include "kernels/cache/cache.h"
#include "kernels/layernorm/layernorm.h"
#include "kernels/rotary/rotary.h"

namespace npu_ops {

struct QkNormRotaryParams {
  RotaryParams rotary;
  CacheParams cache;                // its key and value are those of the first cache.tokens tokens
  const void *query_weight, *key_weight;  // [head_size], null: no norm
  Dtype weight_dtype;
  float eps;
};

constexpr void leave_out(QkNormRotaryParams& p, const Padding& padding) { leave_out(p.rotary, padding); }

NPU_KERNEL(qk_norm_rotary, QkNormRotaryParams)

}  // namespace npu_ops
