#include "kernels/linear_epilogues/linear_epilogues.h"

#include <array>

#include "bindings/launch.h"
#include "bindings/linear.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

Tensor activated(const Tensor& x) {
  std::array<StableIValue, 1> stack{torch::stable::detail::from(x)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("npu_ops::silu_and_mul", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Where torch's product is the faster one, the epilogue follows it as an op of its own.
Tensor linear_silu_and_mul(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  LinearCall call = linear_call("linear_silu_and_mul", x, weight, bias);
  LinearParams& params = call.params;
  NPU_CHECK(params.n % 2 == 0, "linear_silu_and_mul: weight holds the rows of gates, then as many of ups, but has ", params.n, " rows.");
  if (prefers_torch(params)) return activated(torch_linear(x, weight, bias));
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = params.ldo = params.n / 2;
  Tensor out = empty(sizes, x);
  params.out = out.data_ptr();
  launch<linear_silu_and_mul_tiers>(x, "npu_ops::linear_silu_and_mul", params);
  return out;
}

void linear_add(Tensor residual, Tensor x, Tensor weight, std::optional<Tensor> bias) {
  LinearCall call = linear_call("linear_add_", x, weight, bias);
  LinearParams& params = call.params;
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = params.n;
  NPU_CHECK(sizes_of(residual) == sizes, "linear_add_: residual must have the shape of the product, with ", params.n, " columns.");
  check_same_dtype(x, residual, "residual");
  check_same_device(x, residual, "residual");
  check_written(residual, "residual");
  const Rows rows = rows_of(residual);
  NPU_CHECK(rows.outer == 1 && rows.tensor.data_ptr() == residual.data_ptr(),
            "linear_add_: residual is written in place, so its rows must be contiguous and lie one stride apart; call contiguous() first.");
  NPU_CHECK(residual.numel() == 0 || residual.data_ptr() != x.data_ptr(), "linear_add_: residual must not be x, which is read meanwhile.");
  params.out = residual.data_ptr();
  params.ldo = rows.stride_inner;
  if (!prefers_torch(params)) return launch<linear_add_tiers>(x, "npu_ops::linear_add_", params);
  const Tensor y = torch_linear(x, weight, bias);
  launch<add_rows_tiers>(x, "npu_ops::linear_add_", AddRowsParams{params.out, y.data_ptr(), params.m, params.n, params.ldo, params.dtype});
}

}  // namespace

NPU_OPS(m) {
  m.impl("linear_silu_and_mul", TORCH_BOX(&linear_silu_and_mul));
  m.impl("linear_add_", TORCH_BOX(&linear_add));
}

}  // namespace npu_ops
