#include "kernels/norm_quant/norm_quant.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

NormQuantParams params_of(const char* name, const Rows& x, const std::optional<Tensor>& residual, const Tensor& weight, double eps, Tensor& codes,
                          Tensor& scale) {
  const ScalarType code = codes.scalar_type();
  NPU_CHECK(code == ScalarType::Char || code == ScalarType::Float8_e4m3fn, name, ": dtype must be int8 or float8_e4m3fn.");
  NPU_CHECK(weight.dim() == 1 && weight.size(0) == x.width && weight.is_contiguous(), name, ": weight must be contiguous [", x.width, "].");
  check_same_device(x.tensor, weight, "weight");
  if (residual) {
    NPU_CHECK(residual->is_contiguous() && sizes_of(*residual) == sizes_of(codes), name, ": residual must be contiguous and of x's shape.");
    check_same_dtype(x.tensor, *residual, "residual");
    check_same_device(x.tensor, *residual, "residual");
  }
  NormQuantParams params{};
  params.norm = {x.tensor.data_ptr(), residual ? residual->data_ptr() : nullptr, weight.data_ptr(), nullptr, x.outer, x.inner, x.width, x.stride_outer,
                 x.stride_inner, static_cast<float>(eps), dtype_of(x.tensor, "x"), dtype_of(weight, "weight"), false};
  params.codes = codes.data_ptr();
  params.scale = static_cast<float*>(scale.data_ptr());
  params.fp8 = code == ScalarType::Float8_e4m3fn;
  return params;
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_dynamic_quant(Tensor x, std::optional<Tensor> residual, Tensor weight, double eps, bool symmetric,
                                                          ScalarType dtype) {
  NPU_CHECK(symmetric || dtype == ScalarType::Char, "rms_norm_dynamic_quant: floating codes have no zero points, take symmetric.");
  const Rows rows = rows_of(x);
  const int64_t count = rows.outer * rows.inner;
  Tensor codes = empty(x.sizes(), x, dtype);
  Tensor scale = empty({count, 1}, x, ScalarType::Float);
  Tensor zero = empty({symmetric ? 0 : count, 1}, x, ScalarType::Int);
  NormQuantParams params = params_of("rms_norm_dynamic_quant", rows, residual, weight, eps, codes, scale);
  params.zero = symmetric ? nullptr : static_cast<int32_t*>(zero.data_ptr());
  launch<norm_quant_tiers>(x, "npu_ops::rms_norm_dynamic_quant", params);
  return {codes, scale, zero};
}

Tensor rms_norm_static_quant(Tensor x, std::optional<Tensor> residual, Tensor weight, double eps, Tensor scale, ScalarType dtype) {
  NPU_CHECK(scale.scalar_type() == ScalarType::Float && scale.numel() == 1, "rms_norm_static_quant: scale must be float32 [1].");
  check_same_device(x, scale, "scale");
  const Rows rows = rows_of(x);  // holds what params point to
  Tensor codes = empty(x.sizes(), x, dtype);
  NormQuantParams params = params_of("rms_norm_static_quant", rows, residual, weight, eps, codes, scale);
  params.is_static = true;
  launch<norm_quant_tiers>(x, "npu_ops::rms_norm_static_quant", params);
  return codes;
}

}  // namespace

NPU_OPS(m) {
  m.impl("rms_norm_dynamic_quant", TORCH_BOX(&rms_norm_dynamic_quant));
  m.impl("rms_norm_static_quant", TORCH_BOX(&rms_norm_static_quant));
}

}  // namespace npu_ops
