#include "kernels/int8_experts/int8_experts.h"

#include "bindings/experts.h"
#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

constexpr const char* kOp = "int8_experts";

Int8Experts projection(const Tensor& x, const Tensor& w, const Tensor& scale, int64_t panels, int64_t k, const char* name) {
  NPU_CHECK(w.dim() == 4 && w.size(1) == panels && w.size(2) == (k + 3) / 4 && w.size(3) == 128 && w.scalar_type() == ScalarType::Byte &&
                w.is_contiguous(),
            kOp, ": ", name, " must be contiguous uint8 [experts, ", panels, ", ", (k + 3) / 4, ", 128]; pack it with npu_ops.panels.");
  NPU_CHECK(scale.scalar_type() == ScalarType::Float && scale.is_contiguous() && scale.numel() == w.size(0) * panels * 32, kOp,
            ": the scale of ", name, " must be contiguous float32 [", w.size(0), ", ", panels * 32, "], padded to whole panels.");
  check_same_device(x, w, name);
  check_same_device(x, scale, "scale");
  return {static_cast<const uint8_t*>(w.data_ptr()), static_cast<const float*>(scale.data_ptr()), panels, k};
}

Tensor int8_experts(Tensor x, Tensor w13, Tensor scale13, Tensor w2, Tensor scale2, Tensor weights, Tensor ids, std::optional<Tensor> bias13,
                    std::optional<Tensor> bias2, std::optional<Tensor> expert_map, int64_t width, std::string activation, double alpha,
                    double beta, double limit, bool weigh_input) {
  NPU_CHECK(x.dim() == 2 && w13.dim() == 4 && w2.dim() == 4 && w13.size(0) == w2.size(0), kOp,
            ": x must be [tokens, hidden], w13 and w2 [experts, panels, units, 128].");
  x = with_dense_rows(x);
  const int64_t hidden = x.size(1), one = (width + 31) / 32;
  const bool gated = w13.size(1) == 2 * one;
  Tensor out = empty({x.size(0), hidden}, x);
  const Int8ExpertsParams params{
      experts_params(kOp, x, out, width, w13.size(0), gated, weights, ids, bias13, bias2, expert_map, {activation, false, alpha, beta, limit, weigh_input}),
      {projection(x, w13, scale13, gated ? 2 * one : one, hidden, "w13"), projection(x, w2, scale2, (hidden + 31) / 32, width, "w2")}};
  if (x.size(0)) launch<int8_experts_tiers>(x, "npu_ops::int8_experts", params);
  return out;
}

}  // namespace

NPU_OPS(m) { m.impl("int8_experts", TORCH_BOX(&int8_experts)); }

}  // namespace npu_ops
