// Ops that PyTorch routes elsewhere because the device is not a CPU: brought back to the CPU kernels on aliases.
#include <ATen/RedispatchFunctions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>

#include "aten/alias.h"
#include "runtime/launch.h"

namespace npu {
namespace {

using at::Tensor;
using c10::SymIntArrayRef;
using std::optional;
using Aliased = AliasedTensors;
using Mask = std::array<bool, 3>;

optional<Tensor> maybe(const Tensor& tensor) { return tensor.defined() ? optional<Tensor>(tensor) : std::nullopt; }

Tensor empty_result_of_linear(const Tensor& input, const Tensor& weight) {
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return at::empty(sizes, input.options());
}

// ---- linear: one kernel instead of the three ops it is composed of, where nothing is to be differentiated ----
// The product that at::linear comes to for matrices, without the dispatch of its parts.
Tensor product(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const Tensor transposed =
      at::native::as_strided_tensorimpl(weight, {weight.size(1), weight.size(0)}, {weight.stride(1), weight.stride(0)}, std::nullopt);
  return bias.defined() ? at::cpu::addmm(bias, input, transposed) : at::cpu::mm(input, transposed);
}

Tensor linear(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias) {
  if (is_skipped("aten::linear")) return empty_result_of_linear(input, weight);
  return launch_on_aliases("aten::linear", {input, weight, bias.value_or(Tensor())},
                           [](const Aliased& a) {
                             const bool are_matrices = a[0].dim() == 2 && a[1].dim() == 2 && a[0].is_cpu() && a[1].is_cpu();
                             return are_matrices ? product(a[0], a[1], a[2]) : at::linear(a[0], a[1], maybe(a[2]));
                           });
}

bool is_differentiated(const Tensor& tensor) {
  return tensor.defined() && (tensor._fw_grad(/*level=*/0).defined() || (tensor.requires_grad() && at::GradMode::is_enabled()));
}

// The parts have derivatives of all kinds; linear itself has a backward, but no forward mode.
Tensor linear_with_autograd(c10::DispatchKeySet keys, const Tensor& input, const Tensor& weight, const optional<Tensor>& bias) {
  if (is_differentiated(input) || is_differentiated(weight) || is_differentiated(bias.value_or(Tensor()))) {
    return at::native::linear(input, weight, bias);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return at::redispatch::linear(keys & c10::after_autograd_keyset, input, weight, bias);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& input, const Tensor& grad, const Tensor& weight, Mask mask) {
  Tensor grad_input, grad_weight, grad_bias;
  const Tensor rows = grad.reshape({-1, grad.size(-1)});
  if (mask[0]) grad_input = at::matmul(grad, weight.conj());
  if (mask[1]) grad_weight = rows.t().matmul(input.reshape({-1, input.size(-1)}).conj());
  if (mask[2]) grad_bias = rows.sum(0);
  return {grad_input, grad_weight, grad_bias};
}

// ---- convolution: "overrideable" is the backend PyTorch selects for PrivateUse1 ----
struct Convolution {
  std::vector<int64_t> stride, padding, dilation, output_padding;
  bool transposed;
  int64_t groups;
};

Convolution geometry(SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
                     SymIntArrayRef output_padding, const c10::SymInt& groups) {
  return {C10_AS_INTARRAYREF_SLOW(stride).vec(),         C10_AS_INTARRAYREF_SLOW(padding).vec(),
          C10_AS_INTARRAYREF_SLOW(dilation).vec(),       C10_AS_INTARRAYREF_SLOW(output_padding).vec(),
          transposed,                                    groups.expect_int()};
}

Tensor convolution(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
                   c10::SymInt groups) {
  const auto g = geometry(stride, padding, dilation, transposed, output_padding, groups);
  return launch_on_aliases("aten::convolution", {input, weight, bias.value_or(Tensor())}, [g](const Aliased& a) {
    return at::convolution(a[0], a[1], maybe(a[2]), g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups);
  });
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        SymIntArrayRef stride, SymIntArrayRef padding,
                                                        SymIntArrayRef dilation, bool transposed,
                                                        SymIntArrayRef output_padding, c10::SymInt groups, Mask mask) {
  const auto g = geometry(stride, padding, dilation, transposed, output_padding, groups);
  const int64_t channels = transposed ? weight.size(1) * g.groups : weight.size(0);
  return launch_on_aliases("aten::convolution_backward", {grad, input, weight}, [g, mask, channels](const Aliased& a) {
    return at::convolution_backward(a[0], a[1], a[2], at::IntArrayRef(channels), g.stride, g.padding, g.dilation,
                                    g.transposed, g.output_padding, g.groups, mask);
  });
}

// ---- recurrent cells: chosen as "fused" for PrivateUse1, with no CPU kernel; the arithmetic of torch.nn.LSTMCell and GRUCell ----
Tensor add_biases(const Tensor& gates, const optional<Tensor>& first, const optional<Tensor>& second) {
  Tensor sum = gates;
  if (first && first->defined()) sum = sum + *first;
  if (second && second->defined()) sum = sum + *second;
  return sum;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const optional<Tensor>& input_bias, const optional<Tensor>& hidden_bias) {
  const auto gates = add_biases(input_gates + hidden_gates, input_bias, hidden_bias).chunk(4, 1);
  const Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};  // the activated gates are the backward's workspace
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const optional<Tensor>& grad_hy, const optional<Tensor>& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  const bool has_hy = grad_hy && grad_hy->defined(), has_cy = grad_cy && grad_cy->defined();
  if (!has_hy && !has_cy) return {};
  const auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const Tensor ghy = has_hy ? *grad_hy : at::zeros_like(cy);
  const Tensor tanh_cy = cy.tanh();
  Tensor gcy = ghy * out * (1 - tanh_cy * tanh_cy);
  if (has_cy) gcy = gcy + *grad_cy;
  const Tensor grad_gates = at::cat({gcy * cell * in * (1 - in), gcy * cx * forget * (1 - forget),
                                     gcy * in * (1 - cell * cell), ghy * tanh_cy * out * (1 - out)}, 1);
  return {grad_gates, gcy * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const optional<Tensor>& input_bias, const optional<Tensor>& hidden_bias) {
  const auto input = add_biases(input_gates, input_bias, std::nullopt).chunk(3, 1);
  const auto hidden = add_biases(hidden_gates, hidden_bias, std::nullopt).chunk(3, 1);
  const Tensor reset = (input[0] + hidden[0]).sigmoid(), update = (input[1] + hidden[1]).sigmoid();
  const Tensor fresh = (input[2] + reset * hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const Tensor &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3], &hidden = saved[4];
  const Tensor grad_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  const Tensor grad_update = grad_hy * (hx - fresh) * update * (1 - update);
  const Tensor grad_reset = grad_fresh * hidden * reset * (1 - reset);
  const Tensor grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {grad_input, grad_hidden, grad_hy * update, has_bias ? grad_input.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

// ---- dropout: the CPU kernel draws from the CPU's generator; here the mask comes from the device's ----
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  const double kept = 1 - p;
  const Tensor mask = at::empty_like(input, at::kBool).bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0. : 1 / kept), mask};
}

// ---- attention: the CPU's choice; its flash kernel then runs as an ordinary fallback, with autograd ----
int64_t sdp_choice(const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& mask,
                   double dropout, bool causal, optional<double> scale, bool gqa) {
  constexpr int64_t kMath = 0;  // at::SDPBackend::math
  const bool masked = mask && mask->defined();
  if (masked && mask->requires_grad() && at::GradMode::is_enabled()) return kMath;
  if (query.is_nested() || key.is_nested() || value.is_nested()) return kMath;
  // The choice looks at shapes and settings, never at memory: while torch.compile traces there is none to make aliases of.
  return at::cpu::_fused_sdp_choice(query, key, value, mask, dropout, causal, scale, gqa);
}

// ---- nested tensors: no mask can be taken for one here, so nn.TransformerEncoder keeps a padded batch as it is ----
bool is_mask_of_nested(const Tensor&, const Tensor&) { return false; }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("linear", linear);
  m.impl("linear_backward", linear_backward);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("_nested_tensor_from_mask_left_aligned", is_mask_of_nested);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("linear", linear_with_autograd); }

}  // namespace npu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &npu::sdp_choice)
}  // namespace at::native
