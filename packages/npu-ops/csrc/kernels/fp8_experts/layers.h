// The projections of fp8_experts as what fp8_linear multiplies.
#pragma once

#include "kernels/fp8_experts/fp8_experts.h"
#include "kernels/fp8_linear/body.h"
#include "kernels/moe/quantized_experts.h"

namespace npu_ops::NPU_TIER {
namespace {

// What the rows and weights of a pass have in common.
inline Fp8LinearParams expert_layer(const Fp8ExpertsParams& p, int pass) {
  const Fp8Experts& w = p.passes[pass];
  Fp8LinearParams q{};
  q.x_scale = w.x_scale;
  q.x_group = p.x_group < 0 || w.x_scale ? w.k : p.x_group;
  q.k = w.k, q.ldw = w.k, q.block_n = p.block_n, q.block_k = p.block_k;
  return q;
}

// Bytes of one projection of an expert.
NPU_INLINE int64_t projection_bytes(const Fp8ExpertsParams& p, const Fp8Experts& w) {
  return p.in_panels ? ceil_div(w.n, npu_ops::kColumns) * ceil_div(w.k, 4) * Bytes::kUnit : w.n * w.k;
}

// The same of a block, with its weights.
inline Fp8LinearParams expert_layer(const Fp8ExpertsParams& p, const ExpertBlock& block) {
  const Fp8Experts& w = p.passes[block.pass];
  const int64_t scales = ceil_div(w.n, p.block_n) * ceil_div(w.k, p.block_k), projection = block.slice->expert * (w.rows / w.n) + block.up;
  Fp8LinearParams q = expert_layer(p, block.pass);
  q.w = w.w + projection * projection_bytes(p, w);
  q.scale = w.scale + projection * scales;
  q.m = block.slice->count, q.first = block.column, q.n = block.column + block.columns;
  return q;
}

// The same weights as rows, in a slot of the caller that Formats do not use: for what has no way of its own from panels.
inline Fp8ExpertsParams experts_with_rows(Fp8ExpertsParams p, const Parallel& parallel) {
  int64_t rows[2], bytes[2];
  for (int i = 0; i < 2; ++i) rows[i] = p.experts.experts * p.passes[i].rows, bytes[i] = rows[i] * p.passes[i].k;
  uint8_t* out = static_cast<uint8_t*>(thread_scratch(kCallerSlots + 5, bytes[0] + bytes[1] + 1));
  for (int i = 0; i < 2; ++i) {
    Fp8Experts& w = p.passes[i];
    const int64_t projection = projection_bytes(p, w);
    parallel(rows[i], greater(1, 16384 / greater(1, w.k)), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) row_of_panels(out + n * w.k, w.w + n / w.n * projection, n % w.n, w.k);
    });
    w.w = out, out += bytes[i];
  }
  p.in_panels = false;
  return p;
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
