#include "kernels/gates/gates.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

Rows even_rows(const Tensor& input) {
  const Rows x = rows_of(input);
  return x.outer > 1 ? rows_of(torch::stable::contiguous(input)) : x;  // the kernels have one stride
}

struct Numbers {
  double a = 0, b = 0, c = 0;
};

Tensor run(const char* name, const Tensor& input, Gate kind, Numbers numbers = {}, bool interleaved = false) {
  const Rows x = even_rows(input);
  NPU_CHECK(x.width % 2 == 0, name, ": the last dimension holds gate and up, so it must be even, got ", x.width, ".");
  std::vector<int64_t> sizes = sizes_of(input);
  sizes.back() /= 2;
  Tensor out = empty(sizes, input);
  const GateParams params{x.tensor.data_ptr(), out.data_ptr(), x.inner, sizes.back(), x.stride_inner, dtype_of(input, "x"), kind, interleaved,
                          {static_cast<float>(numbers.a), static_cast<float>(numbers.b), static_cast<float>(numbers.c)}};
  launch<gate_tiers>(input, name, params);
  return out;
}

Tensor mul_and_silu(Tensor x) { return run("npu_ops::mul_and_silu", x, Gate::mul_silu); }
Tensor fatrelu_and_mul(Tensor x, double threshold) { return run("npu_ops::fatrelu_and_mul", x, Gate::fatrelu, {threshold}); }
Tensor situ_and_mul(Tensor x, double beta, double linear_beta) {
  return run("npu_ops::situ_and_mul", x, Gate::situ, {beta, linear_beta});
}
Tensor silu_and_mul_with_clamp(Tensor x, double limit, double alpha, double beta) {
  return run("npu_ops::silu_and_mul_with_clamp", x, Gate::clamped, {limit, alpha, beta});
}
Tensor swigluoai_and_mul(Tensor x, double alpha, double limit) {
  return run("npu_ops::swigluoai_and_mul", x, Gate::clamped, {limit, alpha, 1.0}, true);
}
Tensor swiglustep_and_mul(Tensor x, double limit) { return run("npu_ops::swiglustep_and_mul", x, Gate::step, {limit}); }
Tensor gelu_and_mul_sparse(Tensor x, double std_multiplier, bool tanh) {
  return run("npu_ops::gelu_and_mul_sparse", x, tanh ? Gate::sparse_tanh : Gate::sparse_erf, {std_multiplier});
}

Tensor xielu(Tensor input, Tensor alpha_p, Tensor alpha_n, double beta, double eps) {
  const Rows x = even_rows(input);
  NPU_CHECK(alpha_p.numel() == 1 && alpha_n.numel() == 1, "xielu: alpha_p and alpha_n must have one element each.");
  check_same_dtype(alpha_p, alpha_n, "alpha_n");
  check_same_device(input, alpha_p, "alpha_p");
  check_same_device(input, alpha_n, "alpha_n");
  Tensor out = empty(sizes_of(input), input);
  const XieluParams params{x.tensor.data_ptr(), out.data_ptr(), x.inner, x.width, x.stride_inner, alpha_p.data_ptr(), alpha_n.data_ptr(),
                           static_cast<float>(beta), static_cast<float>(eps), dtype_of(input, "x"), dtype_of(alpha_p, "alpha_p")};
  launch<xielu_tiers>(input, "npu_ops::xielu", params);
  return out;
}

}  // namespace

NPU_OPS(m) {
  m.impl("mul_and_silu", TORCH_BOX(&mul_and_silu));
  m.impl("fatrelu_and_mul", TORCH_BOX(&fatrelu_and_mul));
  m.impl("situ_and_mul", TORCH_BOX(&situ_and_mul));
  m.impl("silu_and_mul_with_clamp", TORCH_BOX(&silu_and_mul_with_clamp));
  m.impl("swigluoai_and_mul", TORCH_BOX(&swigluoai_and_mul));
  m.impl("swiglustep_and_mul", TORCH_BOX(&swiglustep_and_mul));
  m.impl("gelu_and_mul_sparse", TORCH_BOX(&gelu_and_mul_sparse));
  m.impl("xielu", TORCH_BOX(&xielu));
}

}  // namespace npu_ops
