#include "kernels/activation/activation.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

Tensor activate(const char* name, const Tensor& input, Activation kind, bool gated) {
  Rows x = rows_of(input);
  if (x.outer > 1) {  // two strides: the kernel has one
    x = rows_of(torch::stable::contiguous(input));
  }
  NPU_CHECK(!gated || x.width % 2 == 0, name, ": the last dimension holds gate and up, so it must be even, got ", x.width, ".");
  std::vector<int64_t> sizes = sizes_of(input);
  if (gated) sizes.back() /= 2;
  Tensor out = empty(sizes, input);
  const ActivationParams params{x.tensor.data_ptr(), out.data_ptr(), x.inner, sizes.back(), x.stride_inner, dtype_of(input, "x"), kind, gated};
  launch<activation_tiers>(input, name, params);
  return out;
}

Tensor silu_and_mul(Tensor x) { return activate("npu_ops::silu_and_mul", x, Activation::silu, true); }
Tensor gelu_and_mul(Tensor x, bool tanh) {
  return activate("npu_ops::gelu_and_mul", x, tanh ? Activation::gelu_tanh : Activation::gelu_erf, true);
}
Tensor gelu(Tensor x, bool tanh) { return activate("npu_ops::gelu", x, tanh ? Activation::gelu_tanh : Activation::gelu_erf, false); }
Tensor quick_gelu(Tensor x) { return activate("npu_ops::quick_gelu", x, Activation::quick_gelu, false); }
Tensor relu2(Tensor x) { return activate("npu_ops::relu2", x, Activation::relu2, false); }

}  // namespace

NPU_OPS(m) {
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
  m.impl("gelu", TORCH_BOX(&gelu));
  m.impl("quick_gelu", TORCH_BOX(&quick_gelu));
  m.impl("relu2", TORCH_BOX(&relu2));
}

}  // namespace npu_ops
