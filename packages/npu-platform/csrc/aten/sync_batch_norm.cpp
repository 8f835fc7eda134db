// The parts of nn.SyncBatchNorm, which PyTorch has for its own devices alone: between them, ranks exchange statistics.
//
// Statistics have one value for each channel, dimension 1, in float32 (float64 for float64).
#include <ATen/TensorOperators.h>
#include <ATen/ops/var_mean.h>
#include <torch/library.h>

namespace npu {
namespace {

using at::Tensor;
using std::optional;

Tensor widened(const Tensor& tensor) { return tensor.to(tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat); }

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t i = 2; i < input.dim(); ++i) dims.push_back(i);
  return dims;
}

// The values of channels in the shape that broadcasts over `input`.
Tensor over(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(size_t(input.dim()), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

bool is_given(const optional<Tensor>& tensor) { return tensor && tensor->defined(); }

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  const auto [variance, mean] = at::var_mean(widened(input), all_but_channels(input), /*correction=*/0);
  return {mean, (variance + eps).rsqrt()};
}

void renew(const optional<Tensor>& running, const Tensor& value, double momentum) {
  if (!is_given(running)) return;
  Tensor kept = *running;
  kept.mul_(1 - momentum).add_(value, momentum);
}

// `mean` and `invstd` of (ranks, channels), `counts` of (ranks).
std::tuple<Tensor, Tensor> gather_stats(const Tensor&, const Tensor& mean, const Tensor& invstd, const optional<Tensor>& running_mean,
                                        const optional<Tensor>& running_var, double momentum, double eps, const Tensor& counts) {
  const Tensor weights = counts.to(mean.scalar_type()).unsqueeze(1);
  const Tensor total = weights.sum();
  const Tensor joint = (mean * weights).sum(0) / total;
  const Tensor variances = invstd.square().reciprocal() - eps;
  const Tensor squares = ((variances + (mean - joint).square()) * weights).sum(0);
  renew(running_mean, joint, momentum);
  renew(running_var, squares / (total - 1), momentum);
  return {joint, (squares / total + eps).rsqrt()};
}

Tensor normalized(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias, const Tensor& mean,
                  const Tensor& invstd, double) {
  const Tensor scale = is_given(weight) ? invstd * *weight : invstd;
  Tensor result = (widened(input) - over(mean, input)) * over(scale, input);
  if (is_given(bias)) result = result + over(*bias, input);
  return result.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                           const Tensor& invstd, const optional<Tensor>& weight, bool input_g,
                                                           bool weight_g, bool bias_g) {
  const auto dims = all_but_channels(input);
  const Tensor dy = widened(grad);
  const Tensor sum_dy = dy.sum(dims), sum_dy_xmu = (dy * (widened(input) - over(mean, input))).sum(dims);
  const auto dtype = is_given(weight) ? weight->scalar_type() : mean.scalar_type();
  return {input_g ? sum_dy : Tensor(), input_g ? sum_dy_xmu : Tensor(), weight_g ? (sum_dy_xmu * invstd).to(dtype) : Tensor(),
          bias_g ? sum_dy.to(dtype) : Tensor()};
}

Tensor backward(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd, const optional<Tensor>& weight,
                const Tensor& sum_dy, const Tensor& sum_dy_xmu, const Tensor& count) {
  const Tensor total = count.sum();
  const Tensor slope = sum_dy_xmu / total * invstd.square();
  const Tensor scale = is_given(weight) ? invstd * *weight : invstd;
  const Tensor centred = widened(input) - over(mean, input);
  const Tensor result = (widened(grad) - over(sum_dy / total, input) - centred * over(slope, input)) * over(scale, input);
  return result.to(input.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("batch_norm_stats", stats);
  m.impl("batch_norm_gather_stats_with_counts", gather_stats);
  m.impl("batch_norm_elemt", normalized);
  m.impl("batch_norm_backward_reduce", backward_reduce);
  m.impl("batch_norm_backward_elemt", backward);
}

}  // namespace npu
