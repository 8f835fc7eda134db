#include "kernels/int8_linear/int8_linear.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

bool is_float(const Tensor& t) { return t.scalar_type() == ScalarType::Float && t.is_contiguous(); }

Int8QuantParams quant_params(const Rows& rows, const Tensor& x, Tensor& out, Tensor& scale, Tensor* zero, bool is_static) {
  return {rows.tensor.data_ptr(),
          static_cast<int8_t*>(out.data_ptr()),
          static_cast<float*>(scale.data_ptr()),
          zero ? static_cast<int32_t*>(zero->data_ptr()) : nullptr,
          rows.inner,
          rows.width,
          rows.stride_inner,
          is_static,
          dtype_of(x, "x")};
}

Rows flat_rows_of(const Tensor& x) {
  Rows rows = rows_of(x);
  return rows.outer > 1 ? rows_of(torch::stable::contiguous(x)) : rows;
}

std::tuple<Tensor, Tensor, Tensor> dynamic_int8_quant(Tensor x, bool symmetric) {
  const Rows rows = flat_rows_of(x);
  Tensor out = empty(x.sizes(), x, ScalarType::Char);
  Tensor scale = empty({rows.inner, 1}, x, ScalarType::Float);
  Tensor zero = empty({symmetric ? 0 : rows.inner, 1}, x, ScalarType::Int);
  launch<int8_quant_tiers>(x, "npu_ops::dynamic_int8_quant",
                                                    quant_params(rows, x, out, scale, symmetric ? nullptr : &zero, false));
  return {out, scale, zero};
}

Tensor static_int8_quant(Tensor x, Tensor scale, std::optional<Tensor> zero) {
  NPU_CHECK(is_float(scale) && scale.numel() == 1, "static_int8_quant: scale must be float32 [1].");
  if (zero) NPU_CHECK(is_int32(*zero) && zero->numel() == 1, "static_int8_quant: zero must be int32 [1].");
  check_same_device(x, scale, "scale");
  check_same_device(x, zero, "zero");
  const Rows rows = flat_rows_of(x);
  Tensor out = empty(x.sizes(), x, ScalarType::Char);
  launch<int8_quant_tiers>(x, "npu_ops::static_int8_quant",
                                                    quant_params(rows, x, out, scale, zero ? &*zero : nullptr, true));
  return out;
}

// Weights of int8_linear and what goes with them; x's part is left empty.
Int8LinearParams weights_of(const Tensor& x, const Rows& rows, const Tensor& weight, const Tensor& weight_scale,
                            const std::optional<Tensor>& weight_sum, const std::optional<Tensor>& bias, int64_t n, Tensor& out) {
  const int64_t k = rows.width, panels = (n + 31) / 32;
  NPU_CHECK(weight.dim() == 3 && weight.size(0) == panels && weight.size(1) == (k + 3) / 4 && weight.size(2) == 128 &&
                weight.scalar_type() == ScalarType::Byte && weight.is_contiguous(),
            "int8_linear: weight must be contiguous uint8 [", panels, ", ", (k + 3) / 4, ", 128] for x of ", k,
            " elements; pack it with npu_ops.panels.");
  NPU_CHECK(is_float(weight_scale) && weight_scale.numel() == panels * 32, "int8_linear: weight_scale must be contiguous float32 [", panels * 32,
            "], padded to whole panels.");
  if (weight_sum)
    NPU_CHECK(is_int32(*weight_sum) && weight_sum->is_contiguous() && weight_sum->numel() == panels * 32,
              "int8_linear: weight_sum must be contiguous int32 [", panels * 32, "].");
  if (bias)
    NPU_CHECK(bias->dim() == 1 && bias->size(0) == n && bias->is_contiguous() && bias->scalar_type() == out.scalar_type(),
              "int8_linear: bias must be contiguous [", n, "] of the result's dtype.");
  check_same_device(x, weight, "weight");
  check_same_device(x, weight_scale, "weight_scale");
  check_same_device(x, weight_sum, "weight_sum");
  check_same_device(x, bias, "bias");
  Int8LinearParams params{};
  params.w = static_cast<const uint8_t*>(weight.data_ptr());
  params.w_scale = static_cast<const float*>(weight_scale.data_ptr());
  params.w_sum = weight_sum ? static_cast<const int32_t*>(weight_sum->data_ptr()) : nullptr;
  params.bias = bias ? bias->data_ptr() : nullptr;
  params.out = out.data_ptr();
  params.m = rows.inner, params.n = n, params.k = k, params.ldo = n;
  params.dtype = dtype_of(out, "out");
  return params;
}

Tensor result_of(const Tensor& x, int64_t n, ScalarType dtype) {
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = n;
  return empty(sizes, x, dtype);
}

Tensor int8_linear(Tensor x, Tensor x_scale, std::optional<Tensor> x_zero, Tensor weight, Tensor weight_scale,
                   std::optional<Tensor> weight_sum, std::optional<Tensor> bias, int64_t out_features, ScalarType dtype) {
  NPU_CHECK(x.scalar_type() == ScalarType::Char, "int8_linear: x must be int8; quantise it first.");
  const Rows rows = flat_rows_of(x);
  if (x_zero && x_zero->numel() == 0) x_zero.reset();
  NPU_CHECK(is_float(x_scale) && (x_scale.numel() == 1 || x_scale.numel() == rows.inner),
            "int8_linear: x_scale must be contiguous float32 [1] or one for each of ", rows.inner, " rows.");
  if (x_zero) {
    NPU_CHECK(is_int32(*x_zero) && x_zero->is_contiguous() && x_zero->numel() == x_scale.numel(),
              "int8_linear: x_zero must be int32 in the shape of x_scale.");
    NPU_CHECK(weight_sum, "int8_linear: x_zero needs weight_sum.");
  }
  check_same_device(x, x_scale, "x_scale");
  check_same_device(x, x_zero, "x_zero");
  Tensor out = result_of(x, out_features, dtype);
  Int8LinearParams params = weights_of(x, rows, weight, weight_scale, weight_sum, bias, out_features, out);
  params.x = static_cast<const int8_t*>(rows.tensor.data_ptr());
  params.x_scale = static_cast<const float*>(x_scale.data_ptr());
  params.x_zero = x_zero ? static_cast<const int32_t*>(x_zero->data_ptr()) : nullptr;
  params.ldx = rows.stride_inner;
  params.x_scale_step = x_scale.numel() == 1 ? 0 : 1;
  launch<int8_linear_tiers>(x, "npu_ops::int8_linear", params);
  return out;
}

Tensor int8_linear_dynamic(Tensor x, bool symmetric, Tensor weight, Tensor weight_scale, std::optional<Tensor> weight_sum,
                           std::optional<Tensor> bias, int64_t out_features) {
  dtype_of(x, "x");
  NPU_CHECK(symmetric || weight_sum, "int8_linear_dynamic: activations with zero points need weight_sum.");
  const Rows rows = flat_rows_of(x);
  Tensor out = result_of(x, out_features, x.scalar_type());
  const Int8DynamicLinearParams params{weights_of(x, rows, weight, weight_scale, weight_sum, bias, out_features, out), rows.tensor.data_ptr(),
                                       rows.stride_inner, symmetric};
  launch<int8_linear_dynamic_tiers>(x, "npu_ops::int8_linear_dynamic", params);
  return out;
}

}  // namespace

NPU_OPS(m) {
  m.impl("dynamic_int8_quant", TORCH_BOX(&dynamic_int8_quant));
  m.impl("static_int8_quant", TORCH_BOX(&static_int8_quant));
  m.impl("int8_linear", TORCH_BOX(&int8_linear));
  m.impl("int8_linear_dynamic", TORCH_BOX(&int8_linear_dynamic));
}

}  // namespace npu_ops
