#include "kernels/linear/linear.h"

#include <array>

#include "bindings/launch.h"
#include "bindings/register.h"
#include "dispatch/batch_invariance.h"
#include "dispatch/linear_choices.h"

namespace npu_ops {
namespace {

Tensor torch_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight), torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// As measured for the shape, or else by the tier's rule of thumb. Batch-invariant mode has one kernel.
bool prefers_torch(const LinearParams& p) {
  const Choice choice = batch_invariant() ? Choice::ours : linear_choice(p.dtype, p.n, p.k, p.m);
  return choice == Choice::torchs || (choice == Choice::unknown && linear_prefers_torch_tiers.chosen()(p));
}

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  const int64_t n = weight.size(0), k = weight.size(1);
  NPU_CHECK(weight.dim() == 2 && x.size(x.dim() - 1) == k, "linear: weight must be [out, in] with in = ", x.size(x.dim() - 1),
            ", the last dimension of x.");
  check_same_dtype(x, weight, "weight");
  check_same_device(x, weight, "weight");
  check_dense_rows(weight, "weight");
  if (bias) {
    NPU_CHECK(bias->dim() == 1 && bias->size(0) == n && bias->is_contiguous(), "linear: bias must be contiguous [", n, "].");
    check_same_dtype(x, *bias, "bias");
  }
  Rows rows = rows_of(x);
  if (rows.outer > 1) rows = rows_of(torch::stable::contiguous(x));
  LinearParams params{rows.tensor.data_ptr(), weight.data_ptr(), bias ? bias->data_ptr() : nullptr, nullptr, rows.inner, n, k,
                      rows.stride_inner, weight.stride(0), dtype_of(x, "x")};
  if (prefers_torch(params)) return torch_linear(x, weight, bias);
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = n;
  Tensor out = empty(sizes, x);
  params.out = out.data_ptr();
  launch<linear_tiers>(x, "npu_ops::linear", params);
  return out;
}

}  // namespace

NPU_OPS(m) {
  m.impl("linear", TORCH_BOX(&linear));
}

}  // namespace npu_ops
