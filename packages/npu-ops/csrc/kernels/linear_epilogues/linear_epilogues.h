// Linear layers that do what comes next while a column of their result is in registers.
#pragma once

#include "kernels/linear/linear.h"

namespace npu_ops {

NPU_KERNEL(linear_silu_and_mul, LinearParams)  // out [m, n / 2]: silu of the first half of the columns times the second
NPU_KERNEL(linear_add, LinearParams)           // out += x w^T + bias

struct AddRowsParams {
  void* out;      // [m, n], rows ldo elements apart
  const void* y;  // [m, n] contiguous
  int64_t m, n, ldo;
  Dtype dtype;
};
NPU_KERNEL(add_rows, AddRowsParams)  // out += y, where y is a product of torch's

}  // namespace npu_ops
