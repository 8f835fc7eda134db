// A linear layer's arguments, checked, and who computes it.
#pragma once

#include "bindings/tensors.h"
#include "kernels/linear/linear.h"

namespace npu_ops {

struct LinearCall {
  Rows rows;            // of x: holds what params point to
  LinearParams params;  // without out
};

// `op` names the op in errors.
LinearCall linear_call(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);

// As measured for the shape, or else by the tier's rule of thumb. Batch-invariant mode has one kernel.
bool prefers_torch(const LinearParams& p);
Tensor torch_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);

}  // namespace npu_ops
