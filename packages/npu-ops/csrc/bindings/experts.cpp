#include "bindings/experts.h"

namespace npu_ops {
namespace {

ExpertActivation activation_of(const char* op, const std::string& name) {
  if (name == "silu") return ExpertActivation::silu;
  if (name == "gelu") return ExpertActivation::gelu_erf;
  if (name == "gelu_tanh") return ExpertActivation::gelu_tanh;
  NPU_CHECK(name == "relu2", op, ": activation must be silu, gelu, gelu_tanh or relu2, got ", name, ".");
  return ExpertActivation::relu2;
}

void check_bias(const char* op, const std::optional<Tensor>& bias, const Tensor& x, int64_t experts, int64_t rows, const char* name) {
  if (!bias) return;
  NPU_CHECK(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == rows && bias->is_contiguous(), op, ": ", name,
            " must be contiguous [", experts, ", ", rows, "].");
  check_same_dtype(x, *bias, name);
  check_same_device(x, *bias, name);
}

}  // namespace

ExpertsParams experts_params(const char* op, const Tensor& x, const Tensor& out, int64_t width, int64_t experts, bool gated, const Tensor& weights,
                             const Tensor& ids, const std::optional<Tensor>& bias13, const std::optional<Tensor>& bias2,
                             const std::optional<Tensor>& expert_map, const ExpertGate& gate) {
  const int64_t tokens = x.size(0), hidden = x.size(1);
  check_bias(op, bias13, x, experts, gated ? 2 * width : width, "bias13");
  check_bias(op, bias2, x, experts, hidden, "bias2");
  NPU_CHECK(ids.dim() == 2 && ids.size(0) == tokens && ids.is_contiguous() && (is_int32(ids) || is_int64(ids)), op,
            ": ids must be contiguous int32 or int64 [", tokens, ", top_k].");
  check_same_device(x, weights, "weights");
  check_same_device(x, ids, "ids");
  check_same_device(x, expert_map, "expert_map");
  const int64_t top_k = ids.size(1), pairs = tokens * top_k;
  NPU_CHECK(weights.dim() == 2 && weights.size(0) == tokens && weights.size(1) == top_k && weights.is_contiguous() &&
                weights.scalar_type() == ScalarType::Float,
            op, ": weights must be contiguous float32 [", tokens, ", ", top_k, "].");
  if (expert_map)
    NPU_CHECK(expert_map->dim() == 1 && is_int32(*expert_map) && expert_map->is_contiguous(), op,
              ": expert_map must be contiguous int32 [global experts].");
  NPU_CHECK(pairs < int64_t{1} << 31, op, ": ", pairs, " pairs of token and expert are more than 2^31; pass fewer tokens.");
  return {x.data_ptr(),
          bias13 ? bias13->data_ptr() : nullptr,
          bias2 ? bias2->data_ptr() : nullptr,
          static_cast<const float*>(weights.data_ptr()),
          ids.data_ptr(),
          expert_map ? static_cast<const int32_t*>(expert_map->data_ptr()) : nullptr,
          out.data_ptr(),
          tokens,
          hidden,
          width,
          experts,
          expert_map ? expert_map->size(0) : experts,
          top_k,
          x.stride(0),
          static_cast<float>(gate.alpha),
          static_cast<float>(gate.beta),
          static_cast<float>(gate.limit),
          dtype_of(x, "x"),
          activation_of(op, gate.activation),
          gated,
          gate.interleaved,
          gate.weigh_input,
          is_int64(ids)};
}

}  // namespace npu_ops
