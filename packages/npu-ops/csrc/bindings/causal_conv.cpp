#include "kernels/causal_conv/causal_conv.h"

#include "bindings/launch.h"
#include "bindings/register.h"
#include "bindings/sequences.h"

namespace npu_ops {
namespace {

Tensor causal_conv1d(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor state, Tensor state_indices, std::optional<Tensor> query_start_loc,
                     std::optional<Tensor> has_initial_state, bool silu) {
  NPU_CHECK(x.dim() == 2 && weight.dim() == 2 && weight.size(0) == x.size(1), "causal_conv1d: x must be [tokens, channels] and weight [channels, width].");
  const int64_t tokens = x.size(0), channels = x.size(1), width = weight.size(1);
  NPU_CHECK(width >= 2 && width <= kMaxConvWidth, "causal_conv1d: the width must be 2 to ", kMaxConvWidth, ", got ", width, ".");
  NPU_CHECK(state.dim() == 3 && state.size(1) == channels && state.size(2) == width - 1, "causal_conv1d: state must be [slots, ", channels, ", ", width - 1, "].");
  const Dtype dtype = dtype_of(x, "x"), state_dtype = dtype_of(state, "state");
  NPU_CHECK(state_dtype == dtype || state_dtype == Dtype::fp32, "causal_conv1d: state must have x's dtype or be float32.");
  check_dense_rows(x, "x");
  check_dense_rows(weight, "weight");
  check_same_dtype(weight, x, "weight");
  check_same_device(weight, x, "weight");
  check_same_device(state, x, "state");
  check_written(state, "state");
  if (bias) {
    NPU_CHECK(bias->numel() == channels && bias->is_contiguous(), "causal_conv1d: bias must be [", channels, "].");
    check_same_dtype(*bias, x, "bias");
    check_same_device(*bias, x, "bias");
  }
  Tensor y = empty({tokens, channels}, x);
  const CausalConvParams params{y.data_ptr(), x.data_ptr(), weight.data_ptr(), bias ? bias->data_ptr() : nullptr, state.data_ptr(),
                                sequences_of("causal_conv1d", x, state, state_indices, query_start_loc, has_initial_state, tokens),
                                channels, width, x.stride(0), weight.stride(0), state.stride(0), state.stride(1), state.stride(2), dtype, state_dtype, silu};
  if (tokens > 0 && channels > 0) launch<causal_conv1d_tiers>(x, "npu_ops::causal_conv1d", params);
  return y;
}

}  // namespace

NPU_OPS(m) { m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d)); }

}  // namespace npu_ops
