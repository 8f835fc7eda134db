#include "kernels/weight_only_experts/weight_only_experts.h"

#include "bindings/experts.h"
#include "bindings/launch.h"
#include "bindings/panels.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

constexpr const char* kOp = "weight_only_experts";

PanelExperts projection(const Tensor& x, const Tensor& w, const Tensor& scales, const std::optional<Tensor>& zeros, PanelFormat format, int64_t panels,
                        int64_t k, int64_t group, const char* name) {
  const int64_t experts = w.size(0), groups = (k + group - 1) / group;
  NPU_CHECK(w.dim() == 4 && w.size(1) == panels && w.size(2) == (k + 3) / 4 && (w.size(3) == 64 || w.size(3) == 128) &&
                w.scalar_type() == ScalarType::Byte && w.is_contiguous(),
            kOp, ": ", name, " must be contiguous uint8 [experts, ", panels, ", ", (k + 3) / 4, ", 64 or 128]; pack it with npu_ops.panels.");
  const auto grouped = [&](const Tensor& t, int64_t rows) {
    return t.dim() == 4 && t.size(0) == experts && t.size(1) == panels && t.size(2) == rows && t.size(3) == 32 && t.is_contiguous();
  };
  const int64_t rows_of_scales = scale_rows(format, groups);
  NPU_CHECK(grouped(scales, rows_of_scales), kOp, ": the scales of ", name, " must be contiguous [", experts, ", ", panels, ", ", rows_of_scales, ", 32].");
  if (zeros)
    NPU_CHECK(grouped(*zeros, groups) && zeros->scalar_type() == ScalarType::Char, kOp, ": the zeros of ", name, " must be int8 in the shape of its scales.");
  check_same_device(x, w, name);
  check_same_device(x, scales, "scales");
  check_same_device(x, zeros, "zeros");
  return {static_cast<const uint8_t*>(w.data_ptr()),
          scales.data_ptr(),
          zeros ? static_cast<const int8_t*>(zeros->data_ptr()) : nullptr,
          panels,
          k,
          group};
}

Tensor weight_only_experts(Tensor x, Tensor w13, Tensor scales13, std::optional<Tensor> zeros13, Tensor w2,
                           Tensor scales2, std::optional<Tensor> zeros2, Tensor weights, Tensor ids,
                           std::optional<Tensor> bias13, std::optional<Tensor> bias2, std::optional<Tensor> expert_map, int64_t width,
                           int64_t group_size, std::string activation, double alpha, double beta, double limit, bool weigh_input) {
  NPU_CHECK(x.dim() == 2 && w13.dim() == 4 && w2.dim() == 4 && w13.size(0) == w2.size(0) && w13.size(3) == w2.size(3), kOp,
            ": x must be [tokens, hidden], w13 and w2 [experts, panels, units, 64 or 128].");
  group_size = within_reach(group_size);
  NPU_CHECK(group_size >= 4 && fits_panels(group_size, x.size(1) > width ? x.size(1) : width), kOp,
            ": group_size must divide 128, be a multiple of 128, or at least the width of both layers, got ", group_size, ".");
  x = with_dense_rows(x);
  const int64_t hidden = x.size(1), one = panels_of(width);
  const bool gated = w13.size(1) == 2 * one;
  const PanelFormat format = panel_format(w13, scales13, zeros13, kOp);
  NPU_CHECK(format == panel_format(w2, scales2, zeros2, kOp) && scales13.scalar_type() == scales2.scalar_type(), kOp,
            ": both projections must be of one format.");
  check_group(format, group_size, kOp);
  Tensor out = empty({x.size(0), hidden}, x);
  const WeightOnlyExpertsParams params{
      experts_params(kOp, x, out, width, w13.size(0), gated, weights, ids, bias13, bias2, expert_map, {activation, false, alpha, beta, limit, weigh_input}),
      {projection(x, w13, scales13, zeros13, format, gated ? 2 * one : one, hidden, group_size, "w13"),
       projection(x, w2, scales2, zeros2, format, panels_of(hidden), width, group_size, "w2")},
      format,
      !is_integer(format) ? Dtype::fp32 : dtype_of(scales13, "scales13")};
  if (x.size(0)) launch<weight_only_experts_tiers>(x, "npu_ops::weight_only_experts", params);
  return out;
}

}  // namespace

NPU_OPS(m) { m.impl("weight_only_experts", TORCH_BOX(&weight_only_experts)); }

}  // namespace npu_ops
