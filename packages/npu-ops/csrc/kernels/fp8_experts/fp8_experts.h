// Experts with weights in 8-bit floats (e4m3), and x as it is or rounded to them: fp8_linear's formats.
#pragma once

#include "kernels/fp8_linear/fp8_linear.h"
#include "kernels/moe/moe.h"

namespace npu_ops {

// One projection of all experts. Gate rows come first, then up rows; no block of scales holds both.
struct Fp8Experts {
  const uint8_t* w;      // [experts, rows, k] contiguous, or panels: [experts, gate and up: 2, ceil(n / 32), ceil(k / 4), 128 bytes]
  const float* scale;    // [experts, gate and up: 2, ceil(n / block_n), ceil(k / block_k)]
  const float* x_scale;  // [1] or null
  int64_t rows, n, k;    // n: rows of gate alone
};

struct Fp8ExpertsParams {
  ExpertsParams experts;
  Fp8Experts passes[2];      // gate and up; down
  int64_t block_n, block_k;  // block_k is at least k, or both are multiples of 32
  int64_t x_group;           // as fp8_linear's; -1: the whole row
  bool in_panels;
};

constexpr void leave_out(Fp8ExpertsParams& p, const Padding& padding) { p.experts.tokens = padding.without(p.experts.tokens); }

NPU_KERNEL(fp8_experts, Fp8ExpertsParams)

}  // namespace npu_ops
