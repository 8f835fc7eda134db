// Gates with numbers of their own (limits, thresholds, learned slopes), where kernels/activation has the plain ones.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

enum class Gate : int { mul_silu, fatrelu, situ, clamped, step, sparse_erf, sparse_tanh };

struct GateParams {
  const void* x;  // rows of 2 * width, `stride` apart
  void* out;      // [rows, width]
  int64_t rows, width, stride;
  Dtype dtype;
  Gate kind;
  bool interleaved;  // gate, up, gate, up ...; else all gates, then all ups
  float numbers[3];  // of the kind, in the order of the op's arguments
};

constexpr void leave_out(GateParams& p, const Padding& padding) { p.rows = padding.without(p.rows); }

NPU_KERNEL(gate, GateParams)

struct XieluParams {
  const void* x;  // rows `stride` apart
  void* out;      // [rows, width]
  int64_t rows, width, stride;
  const void *alpha_p, *alpha_n;  // one element each, before softplus
  float beta, eps;
  Dtype dtype, alpha_dtype;
};

constexpr void leave_out(XieluParams& p, const Padding& padding) { p.rows = padding.without(p.rows); }

NPU_KERNEL(xielu, XieluParams)

}  // namespace npu_ops
