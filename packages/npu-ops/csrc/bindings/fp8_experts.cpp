#include "kernels/fp8_experts/fp8_experts.h"

#include "bindings/experts.h"
#include "bindings/launch.h"
#include "bindings/panels.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

constexpr const char* kOp = "fp8_experts";

// n: rows of one projection; w holds one or two of them
Fp8Experts projection(const Tensor& x, const Tensor& w, const Tensor& scale, const std::optional<Tensor>& x_scale, int64_t n, int64_t k,
                      int64_t block_n, int64_t block_k, const char* name) {
  const bool in_panels = w.dim() == 4;
  const int64_t one = in_panels ? panels_of(n) : n;
  NPU_CHECK((in_panels ? w.size(2) == (k + 3) / 4 && w.size(3) == 128 : w.size(2) == k) && w.is_contiguous() &&
                (w.scalar_type() == ScalarType::Float8_e4m3fn || w.scalar_type() == ScalarType::Byte),
            kOp, ": ", name, " must be contiguous float8_e4m3fn (or its bits as uint8) [experts, rows, ", k, "], or [experts, panels, ",
            (k + 3) / 4, ", 128] packed with npu_ops.panels.");
  const int64_t projections = w.size(1) / one;
  const int64_t scales = w.size(0) * projections * ((n + block_n - 1) / block_n) * ((k + block_k - 1) / block_k);
  NPU_CHECK(scale.scalar_type() == ScalarType::Float && scale.is_contiguous() && scale.numel() == scales, kOp, ": the scale of ", name,
            " must be contiguous float32 with a value for each of ", scales, " blocks.");
  if (x_scale)
    NPU_CHECK(x_scale->scalar_type() == ScalarType::Float && x_scale->numel() == 1, kOp, ": the scale of x for ", name, " must be float32 [1].");
  check_same_device(x, w, name);
  check_same_device(x, scale, "scale");
  check_same_device(x, x_scale, "the scale of x");
  return {static_cast<const uint8_t*>(w.data_ptr()),
          static_cast<const float*>(scale.data_ptr()),
          x_scale ? static_cast<const float*>(x_scale->data_ptr()) : nullptr,
          projections * n,
          n,
          k};
}

Tensor fp8_experts(Tensor x, Tensor w13, Tensor scale13, Tensor w2, Tensor scale2, Tensor weights, Tensor ids, std::optional<Tensor> bias13,
                   std::optional<Tensor> bias2, std::optional<Tensor> expert_map, std::optional<Tensor> x_scale13,
                   std::optional<Tensor> x_scale2, int64_t x_group, int64_t block_n, int64_t block_k, std::string activation, double alpha,
                   double beta, double limit, bool weigh_input) {
  const bool in_panels = w2.dim() == 4;
  block_n = within_reach(block_n), block_k = within_reach(block_k), x_group = within_reach(x_group);
  NPU_CHECK(x.dim() == 2 && (in_panels || w2.dim() == 3) && w13.dim() == w2.dim() && w13.size(0) == w2.size(0), kOp,
            ": x must be [tokens, hidden], w13 [experts, gate and up rows, hidden], w2 [experts, hidden, width], or both packed with npu_ops.panels.");
  x = with_dense_rows(x);
  // of packed weights the width is a multiple of four
  const int64_t hidden = x.size(1), width = in_panels ? 4 * w2.size(2) : w2.size(2);
  NPU_CHECK(hidden > 0 && width > 0, kOp, ": x and w2 must have elements in their last dimension.");
  const int64_t one = in_panels ? panels_of(width) : width, all = in_panels ? panels_of(hidden) : hidden;
  NPU_CHECK(w2.size(1) == all && (w13.size(1) == one || w13.size(1) == 2 * one), kOp, ": w2 must have ", all, " rows or panels for x of ", hidden,
            " elements, got ", w2.size(1), ", and w13 ", one, " or twice that for a width of ", width, ", got ", w13.size(1), ".");
  NPU_CHECK(block_n > 0 && block_k > 0 && ((block_k >= hidden && block_k >= width) || (block_n % 32 == 0 && block_k % 32 == 0)), kOp,
            ": blocks must be multiples of 32 both ways, or hold whole rows; got ", block_n, " x ", block_k, ".");
  NPU_CHECK(x_group >= -1, kOp, ": x_group must be 0 (x as it is), -1 (by token) or a number of elements, got ", x_group, ".");
  const int64_t longest = hidden > width ? hidden : width;
  NPU_CHECK(!in_panels || (fits_panels(block_k, longest) && (x_group < 0 || fits_panels(x_group, longest))), kOp,
            ": beside packed weights block_k and x_group must be multiples of 4 that divide 128, multiples of 128, or hold whole rows; got ", block_k,
            " and ", x_group, ".");
  Tensor out = empty({x.size(0), hidden}, x);
  const Fp8ExpertsParams params{
      experts_params(kOp, x, out, width, w13.size(0), w13.size(1) == 2 * one, weights, ids, bias13, bias2, expert_map,
                     {activation, false, alpha, beta, limit, weigh_input}),
      {projection(x, w13, scale13, x_scale13, width, hidden, block_n, block_k, "w13"),
       projection(x, w2, scale2, x_scale2, hidden, width, block_n, block_k, "w2")},
      block_n, block_k, x_group, in_panels};
  if (x.size(0)) launch<fp8_experts_tiers>(x, "npu_ops::fp8_experts", params);
  return out;
}

}  // namespace

NPU_OPS(m) { m.impl("fp8_experts", TORCH_BOX(&fp8_experts)); }

}  // namespace npu_ops
