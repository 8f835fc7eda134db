// What ops of experts check and pass on alike, whatever the format of the weights.
#pragma once

#include <string>

#include "bindings/tensors.h"
#include "kernels/moe/moe.h"

namespace npu_ops {

struct ExpertGate {
  std::string activation;
  bool interleaved;
  double alpha, beta, limit;
  bool weigh_input;
};

// x with dense rows, out contiguous [tokens, hidden]; `op` names the op in errors.
ExpertsParams experts_params(const char* op, const Tensor& x, const Tensor& out, int64_t width, int64_t experts, bool gated, const Tensor& weights,
                             const Tensor& ids, const std::optional<Tensor>& bias13, const std::optional<Tensor>& bias2,
                             const std::optional<Tensor>& expert_map, const ExpertGate& gate);

}  // namespace npu_ops
