#include "kernels/layernorm/layernorm.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

void run(const char* name, const Rows& x, void* residual, const Tensor& weight, void* out, double eps, bool gemma) {
  const int64_t width = x.width;
  NPU_CHECK(weight.dim() == 1 && weight.size(0) == width && weight.is_contiguous(), name, ": weight must be contiguous [", width, "].");
  check_same_device(x.tensor, weight, "weight");
  const NormParams params{x.tensor.data_ptr(), residual, weight.data_ptr(), out, x.outer, x.inner, width, x.stride_outer, x.stride_inner,
                          static_cast<float>(eps), dtype_of(x.tensor, "x"), dtype_of(weight, "weight"), gemma};
  launch<norm_tiers>(x.tensor, name, params);
}

Tensor norm(const char* name, const Tensor& x, const Tensor& weight, double eps, bool gemma) {
  Tensor out = empty(sizes_of(x), x);
  run(name, rows_of(x), nullptr, weight, out.data_ptr(), eps, gemma);
  return out;
}

void fused(const char* name, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, bool gemma) {
  NPU_CHECK(x.is_contiguous() && residual.is_contiguous() && sizes_of(x) == sizes_of(residual), name,
            ": x and residual must be contiguous and of one shape, they are written in place.");
  check_same_dtype(x, residual, "residual");
  check_same_device(x, residual, "residual");
  run(name, rows_of(x), residual.data_ptr(), weight, x.data_ptr(), eps, gemma);
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) { return norm("npu_ops::rms_norm", x, weight, eps, false); }
Tensor gemma_rms_norm(Tensor x, Tensor weight, double eps) { return norm("npu_ops::gemma_rms_norm", x, weight, eps, true); }
void fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  fused("npu_ops::fused_add_rms_norm", x, residual, weight, eps, false);
}
void fused_add_gemma_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  fused("npu_ops::fused_add_gemma_rms_norm", x, residual, weight, eps, true);
}

}  // namespace

NPU_OPS(m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  m.impl("gemma_rms_norm", TORCH_BOX(&gemma_rms_norm));
  m.impl("fused_add_gemma_rms_norm", TORCH_BOX(&fused_add_gemma_rms_norm));
}

}  // namespace npu_ops
