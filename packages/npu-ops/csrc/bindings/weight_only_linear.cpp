#include "kernels/weight_only_linear/weight_only_linear.h"

#include "bindings/launch.h"
#include "bindings/panels.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

Tensor weight_only_linear(Tensor x, Tensor weight, Tensor scales, std::optional<Tensor> zeros, std::optional<Tensor> order,
                          std::optional<Tensor> bias, int64_t out_features, int64_t group_size) {
  Rows rows = rows_of(x);
  if (rows.outer > 1) rows = rows_of(torch::stable::contiguous(x));
  const int64_t n = out_features, k = rows.width, panels = panels_of(n);
  group_size = within_reach(group_size);
  NPU_CHECK(weight.dim() == 3 && weight.size(0) == panels && weight.size(1) == (k + 3) / 4 && (weight.size(2) == 64 || weight.size(2) == 128) &&
                weight.scalar_type() == ScalarType::Byte && weight.is_contiguous(),
            "weight_only_linear: weight must be contiguous uint8 [", panels, ", ", (k + 3) / 4,
            ", 64 or 128] for x of ", k, " elements; pack it with npu_ops.panels.");
  NPU_CHECK(group_size >= 4 && fits_panels(group_size, k),
            "weight_only_linear: group_size must divide 128, be a multiple of 128, or at least ", k, ", got ", group_size, ".");
  const PanelFormat format = panel_format(weight, scales, zeros, "weight_only_linear");
  check_group(format, group_size, "weight_only_linear");
  const int64_t groups = (k + group_size - 1) / group_size;
  const auto grouped = [&](const Tensor& t, int64_t rows) {
    return t.dim() == 3 && t.size(0) == panels && t.size(1) == rows && t.size(2) == 32 && t.is_contiguous();
  };
  const int64_t rows_of_scales = scale_rows(format, groups);
  NPU_CHECK(grouped(scales, rows_of_scales), "weight_only_linear: scales must be contiguous [", panels, ", ", rows_of_scales, ", 32].");
  if (zeros)
    NPU_CHECK(grouped(*zeros, groups) && zeros->scalar_type() == ScalarType::Char, "weight_only_linear: zeros must be contiguous int8 [", panels, ", ",
              groups, ", 32].");
  if (order)
    NPU_CHECK(order->dim() == 1 && order->size(0) == k && is_int32(*order) && order->is_contiguous(),
              "weight_only_linear: order must be contiguous int32 [", k, "].");
  if (bias) {
    NPU_CHECK(bias->dim() == 1 && bias->size(0) == n && bias->is_contiguous(), "weight_only_linear: bias must be contiguous [", n, "].");
    check_same_dtype(x, *bias, "bias");
  }
  check_same_device(x, weight, "weight");
  check_same_device(x, scales, "scales");
  check_same_device(x, zeros, "zeros");
  check_same_device(x, order, "order");
  check_same_device(x, bias, "bias");
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = n;
  Tensor out = empty(sizes, x);
  const WeightOnlyLinearParams params{rows.tensor.data_ptr(),
                                      static_cast<const uint8_t*>(weight.data_ptr()),
                                      scales.data_ptr(),
                                      zeros ? static_cast<const int8_t*>(zeros->data_ptr()) : nullptr,
                                      order ? static_cast<const int32_t*>(order->data_ptr()) : nullptr,
                                      bias ? bias->data_ptr() : nullptr,
                                      out.data_ptr(),
                                      rows.inner,
                                      n,
                                      k,
                                      rows.stride_inner,
                                      n,
                                      group_size,
                                      format,
                                      dtype_of(x, "x"),
                                      !is_integer(format) ? Dtype::fp32 : dtype_of(scales, "scales")};
  launch<weight_only_linear_tiers>(x, "npu_ops::weight_only_linear", params);
  return out;
}

}  // namespace

NPU_OPS(m) { m.impl("weight_only_linear", TORCH_BOX(&weight_only_linear)); }

}  // namespace npu_ops
