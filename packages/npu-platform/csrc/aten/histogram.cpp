// Histograms of integers, which CUDA has and PyTorch's CPU kernel has not; transformers counts the tokens of each expert so.
#include <ATen/TensorOperators.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "aten/alias.h"
#include "aten/fallback.h"

namespace npu {
namespace {

using at::Scalar;
using at::Tensor;

// The range of the values, unless one is given; a single value lies in the middle of its own, as on CUDA.
std::pair<int64_t, int64_t> range_of(const Tensor& values, int64_t low, int64_t high) {
  if (low == high && values.numel() > 0) {
    low = values.min().item<int64_t>();
    high = values.max().item<int64_t>();
  }
  return low == high ? std::pair(low - 1, high + 1) : std::pair(low, high);
}

Tensor count(const Tensor& self, int64_t bins, int64_t from, int64_t to) {
  if (self.is_meta()) return at::empty({bins}, self.options());
  const Tensor values = self.flatten().to(at::kLong);
  const auto [low, high] = range_of(values, from, to);
  const Tensor places = values.sub(low).mul(bins).div(high - low, "floor").clamp_max(bins - 1);  // the last bin has its end
  const Tensor is_outside = values.lt(low).logical_or(values.gt(high));
  // one more bin for those outside: whatever the values, a graph's replay finds allocations of the same sizes
  const Tensor counts = at::bincount(places.masked_fill(is_outside, bins), /*weights=*/{}, bins + 1);
  return counts.narrow(/*dim=*/0, /*start=*/0, bins).to(self.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

Tensor histc(const Tensor& self, int64_t bins, const Scalar& min, const Scalar& max) {
  if (!at::isIntegralType(self.scalar_type(), /*includeBool=*/false)) {
    static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
    torch::jit::Stack stack{self, bins, min, max};
    fallback(op, &stack);
    return std::move(stack[0]).toTensor();
  }
  TORCH_CHECK(bins > 0, "torch.histc: bins must be positive, got ", bins);
  const auto low = min.to<int64_t>(), high = max.to<int64_t>();
  TORCH_CHECK(low <= high, "torch.histc: max must be at least min, got min ", low, " and max ", high);
  return launch_on_aliases("aten::histc", {self}, [bins, low, high](const AliasedTensors& a) { return count(a[0], bins, low, high); });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("histc", histc); }

}  // namespace
}  // namespace npu
