#include "kernels/centered_norm/centered_norm.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

const void* check_width(const Tensor& x, const std::optional<Tensor>& t, int64_t width, const char* name) {
  if (!t) return nullptr;
  NPU_CHECK(t->dim() == 1 && t->size(0) == width && t->is_contiguous(), "layer_norm: ", name, " must be contiguous [", width, "].");
  check_same_device(x, *t, name);
  return t->data_ptr();
}

Tensor layer_norm(Tensor input, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps, bool plus_one) {
  Rows x = rows_of(input);
  if (x.outer > 1) x = rows_of(torch::stable::contiguous(input));  // the kernel has one stride
  const void *w = check_width(input, weight, x.width, "weight"), *b = check_width(input, bias, x.width, "bias");
  if (weight && bias) check_same_dtype(*weight, *bias, "bias");
  const Dtype dtype = dtype_of(input, "x");
  const Dtype weight_dtype = weight ? dtype_of(*weight, "weight") : bias ? dtype_of(*bias, "bias") : dtype;
  Tensor out = empty(sizes_of(input), input);
  const CenteredNormParams params{x.tensor.data_ptr(), w, b, out.data_ptr(), x.inner, x.width, x.stride_inner, static_cast<float>(eps),
                                  plus_one, dtype, weight_dtype};
  launch<centered_norm_tiers>(input, "npu_ops::layer_norm", params);
  return out;
}

}  // namespace

NPU_OPS(m) { m.impl("layer_norm", TORCH_BOX(&layer_norm)); }

}  // namespace npu_ops
