#include "kernels/moe/moe.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

using Sizes = std::vector<int64_t>;

Scoring scoring_of(const std::string& name) {
  NPU_CHECK(name == "softmax" || name == "sigmoid", "select_experts: scoring must be softmax or sigmoid, got ", name, ".");
  return name == "softmax" ? Scoring::softmax : Scoring::sigmoid;
}

ExpertActivation activation_of(const std::string& name) {
  if (name == "silu") return ExpertActivation::silu;
  if (name == "gelu") return ExpertActivation::gelu_erf;
  if (name == "gelu_tanh") return ExpertActivation::gelu_tanh;
  NPU_CHECK(name == "relu2", "fused_experts: activation must be silu, gelu, gelu_tanh or relu2, got ", name, ".");
  return ExpertActivation::relu2;
}

void check_bias(const std::optional<Tensor>& bias, const Tensor& x, int64_t experts, int64_t rows, const char* name) {
  if (!bias) return;
  NPU_CHECK(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == rows && bias->is_contiguous(), "fused_experts: ", name,
            " must be contiguous [", experts, ", ", rows, "].");
  check_same_dtype(x, *bias, name);
  check_same_device(x, *bias, name);
}

void check_weights(const Tensor& x, const Tensor& w13, const Tensor& w2) {
  NPU_CHECK(x.dim() == 2 && w13.dim() == 3 && w2.dim() == 3 && w13.size(0) == w2.size(0) && w13.size(2) == x.size(1) && w2.size(1) == x.size(1),
            "fused_experts: x must be [tokens, hidden], w13 [experts, gate and up rows, hidden], w2 [experts, hidden, width].");
  NPU_CHECK(w13.size(1) == w2.size(2) || w13.size(1) == 2 * w2.size(2), "fused_experts: w13 must have w2's width or twice that in rows, got ",
            w13.size(1), " for a width of ", w2.size(2), ".");
  for (const auto& [w, name] : {std::pair{&w13, "w13"}, std::pair{&w2, "w2"}}) {
    check_same_dtype(x, *w, name);
    check_same_device(x, *w, name);
    check_dense_rows(*w, name);
  }
}

std::tuple<Tensor, Tensor> select_experts(Tensor logits, int64_t top_k, std::string scoring, bool renormalize, double scale,
                                          std::optional<Tensor> bias, int64_t groups, int64_t top_groups) {
  NPU_CHECK(logits.dim() == 2, "select_experts: logits must be [tokens, experts].");
  check_dense_rows(logits, "logits");
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  NPU_CHECK(top_k > 0 && top_k <= experts, "select_experts: top_k must be in 1..", experts, ", got ", top_k, ".");
  NPU_CHECK(groups == 0 || (groups > 0 && experts % groups == 0 && top_groups > 0 && top_groups <= groups), "select_experts: ", groups,
            " groups of which ", top_groups, " take part do not divide ", experts, " experts; 0 groups for none.");
  if (bias) {
    NPU_CHECK(bias->dim() == 1 && bias->size(0) == experts && bias->is_contiguous(), "select_experts: bias must be contiguous [", experts, "].");
    check_same_device(logits, *bias, "bias");
  }
  Tensor weights = torch::stable::new_empty(logits, Sizes{tokens, top_k}, ScalarType::Float);
  Tensor ids = torch::stable::new_empty(logits, Sizes{tokens, top_k}, ScalarType::Int);
  const SelectExpertsParams params{logits.data_ptr(), bias ? bias->data_ptr() : nullptr, static_cast<float*>(weights.data_ptr()),
                                   static_cast<int32_t*>(ids.data_ptr()), tokens, experts, logits.stride(0), top_k, groups, top_groups,
                                   static_cast<float>(scale), dtype_of(logits, "logits"), bias ? dtype_of(*bias, "bias") : Dtype::fp32,
                                   scoring_of(scoring), renormalize};
  launch<select_experts_tiers>(logits, "npu_ops::select_experts", params);
  return {weights, ids};
}

Tensor fused_experts(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor ids, std::optional<Tensor> bias13, std::optional<Tensor> bias2,
                     std::optional<Tensor> expert_map, std::string activation, bool interleaved, double alpha, double beta, double limit,
                     bool weigh_input) {
  check_weights(x, w13, w2);
  const int64_t tokens = x.size(0), hidden = x.size(1), width = w2.size(2), experts = w13.size(0);
  check_bias(bias13, x, experts, w13.size(1), "bias13");
  check_bias(bias2, x, experts, hidden, "bias2");
  NPU_CHECK(ids.dim() == 2 && ids.size(0) == tokens && ids.is_contiguous() && (is_int32(ids) || is_int64(ids)),
            "fused_experts: ids must be contiguous int32 or int64 [", tokens, ", top_k].");
  const int64_t top_k = ids.size(1), pairs = tokens * top_k;
  NPU_CHECK(weights.dim() == 2 && weights.size(0) == tokens && weights.size(1) == top_k && weights.is_contiguous() &&
                weights.scalar_type() == ScalarType::Float,
            "fused_experts: weights must be contiguous float32 [", tokens, ", ", top_k, "].");
  if (expert_map) NPU_CHECK(expert_map->dim() == 1 && is_int32(*expert_map) && expert_map->is_contiguous(), "fused_experts: expert_map must be contiguous int32 [global experts].");
  NPU_CHECK(pairs < int64_t{1} << 31, "fused_experts: ", pairs, " pairs of token and expert are more than 2^31; pass fewer tokens.");
  x = with_dense_rows(x);
  Tensor out = empty(Sizes{tokens, hidden}, x);
  if (tokens == 0) return out;
  // the workspace is the device's, so that it is accounted for, and as long-lived as a graph that records this
  Tensor activated = empty(Sizes{pairs, width}, x);
  const int64_t packed_rows = std::min(pairs, kFewTokens * experts), packed_width = (std::max(hidden, width) + 63) / 64 * 64;
  Tensor packed = torch::stable::new_empty(x, Sizes{packed_rows * packed_width}, ScalarType::Float);
  Tensor lists = torch::stable::new_empty(x, Sizes{6 * experts + pairs}, ScalarType::Int);
  const FusedExpertsParams params{
      x.data_ptr(), w13.data_ptr(), w2.data_ptr(), bias13 ? bias13->data_ptr() : nullptr, bias2 ? bias2->data_ptr() : nullptr,
      static_cast<const float*>(weights.data_ptr()), ids.data_ptr(),
      expert_map ? static_cast<const int32_t*>(expert_map->data_ptr()) : nullptr, out.data_ptr(), activated.data_ptr(),
      static_cast<float*>(packed.data_ptr()), static_cast<int32_t*>(lists.data_ptr()), tokens, hidden, width, experts,
      expert_map ? expert_map->size(0) : experts, top_k, x.stride(0), w13.stride(1), w2.stride(1), w13.stride(0), w2.stride(0),
      static_cast<float>(alpha), static_cast<float>(beta), static_cast<float>(limit), dtype_of(x, "x"), activation_of(activation),
      w13.size(1) == 2 * width, interleaved, weigh_input, is_int64(ids)};
  launch<fused_experts_tiers>(x, "npu_ops::fused_experts", params);
  return out;
}

}  // namespace

NPU_OPS(m) {
  m.impl("select_experts", TORCH_BOX(&select_experts));
  m.impl("fused_experts", TORCH_BOX(&fused_experts));
}

}  // namespace npu_ops
