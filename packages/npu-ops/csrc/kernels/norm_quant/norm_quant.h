// RMS norm, with or without adding the residual first, whose result goes straight into 8 bits.
#pragma once

#include "kernels/layernorm/layernorm.h"

namespace npu_ops {

// The result is rounded to x's dtype, as if it had been stored, and then to codes: q = round(y / scale) + zero.
struct NormQuantParams {
  NormParams norm;  // its out is not used
  void* codes;      // [rows, width]: int8, or e4m3
  float* scale;     // dynamic: written, [rows]; static: read, [1]
  int32_t* zero;    // written, [rows]; null: symmetric
  bool is_static, fp8;
};

constexpr void leave_out(NormQuantParams& p, const Padding& padding) { leave_out(p.norm, padding); }

NPU_KERNEL(norm_quant, NormQuantParams)

}  // namespace npu_ops
