// y = x w^T + bias, with the weight rows as the checkpoint stores them: no packing, no second copy.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

struct LinearParams {
  const void* x;     // [m, k], rows ldx elements apart
  const void* w;     // [n, k], rows ldw elements apart
  const void* bias;  // [n] or null
  void* out;         // [m, n], rows ldo elements apart
  int64_t m, n, k, ldx, ldw, ldo;
  Dtype dtype;
};

// The product of x's rows [first, first + count). Inlined: a tier may have no symbol that others have too.
template <class T>
__attribute__((always_inline)) inline LinearParams some_rows(LinearParams p, int64_t first, int64_t count) {
  p.x = static_cast<const T*>(p.x) + first * p.ldx;
  p.out = static_cast<T*>(p.out) + first * p.ldo;
  p.m = count;
  return p;
}

// Fewer rows wait for the weights.
__attribute__((always_inline)) constexpr bool multiplies(const LinearParams& p) { return p.dtype == Dtype::bf16 && p.m > 5; }

constexpr void leave_out(LinearParams& p, const Padding& padding) { p.m = padding.without(p.m); }

NPU_KERNEL(linear, LinearParams)

}  // namespace npu_ops
