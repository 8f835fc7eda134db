#include "bindings/experts.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "bindings/launch.h"
#include "bindings/register.h"
#include "dispatch/batch_invariance.h"

namespace npu_ops {
namespace {

using Sizes = std::vector<int64_t>;

Scoring scoring_of(const std::string& name) {
  NPU_CHECK(name == "softmax" || name == "sigmoid", "select_experts: scoring must be softmax or sigmoid, got ", name, ".");
  return name == "softmax" ? Scoring::softmax : Scoring::sigmoid;
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
  Tensor weights = empty({tokens, top_k}, logits, ScalarType::Float);
  Tensor ids = empty({tokens, top_k}, logits, ScalarType::Int);
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
  x = with_dense_rows(x);
  Tensor out = empty(Sizes{tokens, hidden}, x);
  const ExpertsParams shared = experts_params("fused_experts", x, out, width, experts, w13.size(1) == 2 * width, weights, ids, bias13, bias2,
                                              expert_map, {activation, interleaved, alpha, beta, limit, weigh_input});
  if (tokens == 0) return out;
  const int64_t top_k = shared.top_k, pairs = tokens * top_k;
  // the workspace is the device's, so that it is accounted for, and as long-lived as a graph that records this
  const int64_t activated_rows = pairs + (kSliceRows - 1) * std::min(pairs, experts);
  Tensor activated = empty(Sizes{activated_rows, (width + kActivatedStep - 1) / kActivatedStep * kActivatedStep}, x);
  // only the way of few tokens adds up in one order whatever their number
  const int64_t few = batch_invariant() ? pairs : kFewTokens;
  const int64_t packed_rows = std::min(pairs, few * experts), packed_width = (std::max(hidden, width) + 63) / 64 * 64 + 64;
  Tensor packed = empty({packed_rows * packed_width}, x, ScalarType::Float);
  Tensor lists = empty({6 * experts + pairs}, x, ScalarType::Int);
  const FusedExpertsParams params{shared, w13.data_ptr(), w2.data_ptr(), activated.data_ptr(), static_cast<float*>(packed.data_ptr()),
                                  static_cast<int32_t*>(lists.data_ptr()), w13.stride(1), w2.stride(1), w13.stride(0), w2.stride(0), few};
  launch<fused_experts_tiers>(x, "npu_ops::fused_experts", params);
  return out;
}

}  // namespace

NPU_OPS(m) {
  m.impl("select_experts", TORCH_BOX(&select_experts));
  m.impl("fused_experts", TORCH_BOX(&fused_experts));
}

}  // namespace npu_ops
