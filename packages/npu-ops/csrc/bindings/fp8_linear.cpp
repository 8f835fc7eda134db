#include "kernels/fp8_linear/fp8_linear.h"

#include "bindings/launch.h"
#include "bindings/panels.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

Tensor fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, std::optional<Tensor> bias, std::optional<Tensor> x_scale, int64_t x_group,
                  int64_t block_n, int64_t block_k) {
  Rows rows = rows_of(x);
  if (rows.outer > 1) rows = rows_of(torch::stable::contiguous(x));
  const int64_t k = rows.width;
  const bool in_panels = weight.dim() == 3;
  block_n = within_reach(block_n), block_k = within_reach(block_k), x_group = within_reach(x_group);
  NPU_CHECK((in_panels ? are_panels(weight, k) : weight.dim() == 2 && weight.size(1) == k) &&
                (weight.scalar_type() == ScalarType::Float8_e4m3fn || weight.scalar_type() == ScalarType::Byte),
            "fp8_linear: weight must be float8_e4m3fn (or its bits as uint8) [out, ", k, "], or contiguous [out / 32, ", (k + 3) / 4,
            ", 128] packed with npu_ops.panels.");
  check_same_device(x, weight, "weight");
  check_same_device(x, weight_scale, "weight_scale");
  if (!in_panels) check_dense_rows(weight, "weight");
  const int64_t n = weight.size(0) * (in_panels ? 32 : 1);
  NPU_CHECK(k > 0, "fp8_linear: x must have elements in its last dimension.");
  NPU_CHECK(block_n > 0 && block_k > 0 && (block_k >= k || (block_n % 32 == 0 && block_k % 32 == 0)),
            "fp8_linear: blocks must be multiples of 32 both ways, or hold whole rows of ", k, "; got ", block_n, " x ", block_k, ".");
  const int64_t scales = (n + block_n - 1) / block_n * ((k + block_k - 1) / block_k);
  NPU_CHECK(weight_scale.scalar_type() == ScalarType::Float && weight_scale.is_contiguous() && weight_scale.numel() == scales,
            "fp8_linear: weight_scale must be contiguous float32 with a value for each of ", scales, " blocks.");
  NPU_CHECK(x_group >= 0, "fp8_linear: x_group must be 0 (x as it is) or a number of elements, got ", x_group, ".");
  NPU_CHECK(!in_panels || (fits_panels(block_k, k) && (x_scale || fits_panels(x_group, k))), "fp8_linear: beside packed weights block_k and x_group must be ",
            "multiples of 4 that divide 128, multiples of 128, or hold whole rows of ", k, "; got ", block_k, " and ", x_group, ".");
  if (x_scale)
    NPU_CHECK(x_scale->scalar_type() == ScalarType::Float && x_scale->numel() == 1, "fp8_linear: x_scale must be float32 [1].");
  check_same_device(x, x_scale, "x_scale");
  check_same_device(x, bias, "bias");
  if (bias) {
    NPU_CHECK(bias->dim() == 1 && bias->size(0) == n && bias->is_contiguous(), "fp8_linear: bias must be contiguous [", n, "].");
    check_same_dtype(x, *bias, "bias");
  }
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = n;
  Tensor out = empty(sizes, x);
  const Fp8LinearParams params{rows.tensor.data_ptr(),
                               static_cast<const uint8_t*>(weight.data_ptr()),
                               static_cast<const float*>(weight_scale.data_ptr()),
                               x_scale ? static_cast<const float*>(x_scale->data_ptr()) : nullptr,
                               bias ? bias->data_ptr() : nullptr,
                               out.data_ptr(),
                               rows.inner,
                               n,
                               k,
                               rows.stride_inner,
                               n,
                               in_panels ? 0 : weight.stride(0),
                               0,
                               block_n,
                               block_k,
                               x_scale ? k : x_group,
                               dtype_of(x, "x"),
                               in_panels};
  launch<fp8_linear_tiers>(x, "npu_ops::fp8_linear", params);
  return out;
}

}  // namespace

NPU_OPS(m) { m.impl("fp8_linear", TORCH_BOX(&fp8_linear)); }

}  // namespace npu_ops
