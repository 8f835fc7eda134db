#include "bindings/linear.h"

#include <array>

#include "bindings/launch.h"
#include "bindings/register.h"
#include "dispatch/batch_invariance.h"
#include "dispatch/linear_choices.h"

namespace npu_ops {

LinearCall linear_call(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const int64_t n = weight.size(0), k = weight.size(1);
  NPU_CHECK(weight.dim() == 2 && x.size(x.dim() - 1) == k, op, ": weight must be [out, in] with in = ", x.size(x.dim() - 1),
            ", the last dimension of x.");
  check_same_dtype(x, weight, "weight");
  check_same_device(x, weight, "weight");
  check_dense_rows(weight, "weight");
  if (bias) {
    NPU_CHECK(bias->dim() == 1 && bias->size(0) == n && bias->is_contiguous(), op, ": bias must be contiguous [", n, "].");
    check_same_dtype(x, *bias, "bias");
    check_same_device(x, *bias, "bias");
  }
  Rows rows = rows_of(x);
  if (rows.outer > 1) rows = rows_of(torch::stable::contiguous(x));
  const LinearParams params{rows.tensor.data_ptr(), weight.data_ptr(), bias ? bias->data_ptr() : nullptr, nullptr, rows.inner, n, k,
                            rows.stride_inner, weight.stride(0), n, dtype_of(x, "x")};
  return {rows, params};
}

Tensor torch_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight), torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

bool prefers_torch(const LinearParams& p) {
  const Choice choice = batch_invariant() ? Choice::ours : linear_choice(p.dtype, p.n, p.k, p.m);
  // its float product is as good as they come; its bf16 packs the weights at each call
  return choice == Choice::torchs || (choice == Choice::unknown && p.dtype == Dtype::fp32 && p.m > 16);
}

namespace {

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
  LinearCall call = linear_call("linear", x, weight, bias);
  LinearParams& params = call.params;
  if (prefers_torch(params)) return torch_linear(x, weight, bias);
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = params.n;
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
