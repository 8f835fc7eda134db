#include "kernels/state_space/state_space.h"

#include "bindings/launch.h"
#include "bindings/register.h"
#include "bindings/sequences.h"

namespace npu_ops {
namespace {

// [tokens, ...] of `columns` numbers a token, next to each other, in the first argument's dtype.
int64_t check_tokens(const Tensor& t, const Tensor& x, int64_t columns, const char* name) {
  NPU_CHECK(t.dim() >= 2 && t.size(0) == x.size(0) && t.numel() == t.size(0) * columns, name, " must be [tokens, ...] of ", columns, " numbers a token.");
  int64_t stride = 1;
  for (int64_t d = t.dim() - 1; d > 0; --d) {
    NPU_CHECK(t.size(d) == 1 || t.stride(d) == stride, name, " must be contiguous within a token; call contiguous().");
    stride *= t.size(d);
  }
  check_same_dtype(t, x, name);
  check_same_device(t, x, name);
  return t.stride(0);
}

// One number of any of the three dtypes for each head or channel.
const void* check_each(const std::optional<Tensor>& t, const Tensor& x, int64_t count, const char* name, Dtype& dtype) {
  if (!t) return nullptr;
  NPU_CHECK(t->numel() == count && t->is_contiguous(), name, " must hold ", count, " numbers, contiguous.");
  check_same_device(*t, x, name);
  dtype = dtype_of(*t, name);
  return t->data_ptr();
}

int64_t check_state(const Tensor& state, const Tensor& x, int64_t rows, int64_t size, const char* op) {
  int64_t stride = 1;
  for (int64_t d = state.dim() - 1; d > 0; --d) {
    NPU_CHECK(state.size(d) == 1 || state.stride(d) == stride, op, ": state must be contiguous within a slot.");
    stride *= state.size(d);
  }
  check_written(state, "state");
  NPU_CHECK(state.dim() >= 3 && state.size(state.dim() - 1) == size && stride == rows * size, op, ": state must have ", rows, " rows of ", size, " a slot.");
  check_same_device(state, x, "state");
  return state.stride(0);
}

void selective_scan(Tensor y, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, std::optional<Tensor> d, std::optional<Tensor> dt_bias,
                    std::optional<Tensor> z, Tensor state, Tensor state_indices, std::optional<Tensor> query_start_loc,
                    std::optional<Tensor> has_initial_state) {
  NPU_CHECK(a.dim() == 1 || a.dim() == 2, "selective_scan: A must be [heads], or [channels, size] of Mamba-1.");
  NPU_CHECK(b.dim() == 3 && x.dim() == 3, "selective_scan: x must be [tokens, heads, width] and B [tokens, groups, size].");
  const bool by_channel = a.dim() == 2;
  const int64_t heads = x.size(1), width = x.size(2), groups = b.size(1), size = b.size(2);
  NPU_CHECK(by_channel ? heads == 1 && a.size(0) == width && a.size(1) == size : a.size(0) == heads,
            "selective_scan: A must be [", heads, "], or [", width, ", ", size, "] with one head.");
  NPU_CHECK(groups > 0 && heads % groups == 0, "selective_scan: the ", heads, " heads must be a multiple of B's ", groups, " groups.");
  NPU_CHECK(a.scalar_type() == ScalarType::Float && a.is_contiguous(), "selective_scan: A must be float32 and contiguous.");
  check_same_device(a, x, "A");
  check_written(y, "y");
  const int64_t each = by_channel ? width : heads;
  SelectiveScanParams params{};
  params.y = y.data_ptr(), params.x = x.data_ptr(), params.dt = dt.data_ptr(), params.a = static_cast<const float*>(a.data_ptr());
  params.b = b.data_ptr(), params.c = c.data_ptr(), params.state = state.data_ptr(), params.z = z ? z->data_ptr() : nullptr;
  params.d = check_each(d, x, each, "D", params.d_dtype);
  params.dt_bias = check_each(dt_bias, x, each, "dt_bias", params.bias_dtype);
  params.sequences = sequences_of("selective_scan", x, state, state_indices, query_start_loc, has_initial_state, x.size(0));
  params.heads = heads, params.width = width, params.groups = groups, params.size = size;
  params.stride_y = check_tokens(y, x, heads * width, "y"), params.stride_x = check_tokens(x, x, heads * width, "x");
  params.stride_dt = check_tokens(dt, x, each, "dt"), params.stride_b = check_tokens(b, x, groups * size, "B");
  params.stride_c = check_tokens(c, x, groups * size, "C"), params.stride_z = z ? check_tokens(*z, x, heads * width, "z") : 0;
  params.stride_slot = check_state(state, x, heads * width, size, "selective_scan");
  params.dtype = dtype_of(x, "x"), params.state_dtype = dtype_of(state, "state"), params.by_channel = by_channel;
  if (x.numel() > 0) launch<selective_scan_tiers>(x, "npu_ops::selective_scan", params);
}

void gated_delta_rule(Tensor out, Tensor qkv, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor state, Tensor state_indices,
                      std::optional<Tensor> query_start_loc, std::optional<Tensor> has_initial_state) {
  NPU_CHECK(qkv.dim() == 2 && out.dim() == 3 && state.dim() == 4 && out.size(0) == qkv.size(0),
            "gated_delta_rule: qkv must be [tokens, channels], out [tokens, heads, size] and state [slots, heads, size, key size].");
  const int64_t heads = out.size(1), value_size = out.size(2), key_size = state.size(3);
  NPU_CHECK(key_size > 0, "gated_delta_rule: state must be [slots, heads, size, key size > 0].");
  const int64_t key_columns = qkv.size(1) - heads * value_size, key_heads = key_columns / (2 * key_size);
  NPU_CHECK(key_heads > 0 && key_columns == 2 * key_heads * key_size && heads % key_heads == 0,
            "gated_delta_rule: qkv's ", qkv.size(1), " columns must be q and k of some heads of ", key_size, " and v of ", heads, " heads of ", value_size, ".");
  check_written(out, "out");
  GatedDeltaRuleParams params{};
  params.out = out.data_ptr(), params.qkv = qkv.data_ptr(), params.a = a.data_ptr(), params.b = b.data_ptr(), params.state = state.data_ptr();
  params.a_log = check_each(a_log, qkv, heads, "A_log", params.a_log_dtype);
  params.dt_bias = check_each(dt_bias, qkv, heads, "dt_bias", params.bias_dtype);
  params.sequences = sequences_of("gated_delta_rule", qkv, state, state_indices, query_start_loc, has_initial_state, qkv.size(0));
  params.key_heads = key_heads, params.value_heads = heads, params.key_size = key_size, params.value_size = value_size;
  params.stride_out = check_tokens(out, qkv, heads * value_size, "out"), params.stride_qkv = check_tokens(qkv, qkv, qkv.size(1), "qkv");
  params.stride_a = check_tokens(a, qkv, heads, "a"), params.stride_b = check_tokens(b, qkv, heads, "b");
  params.stride_slot = check_state(state, qkv, heads * value_size, key_size, "gated_delta_rule");
  params.dtype = dtype_of(qkv, "qkv"), params.state_dtype = dtype_of(state, "state");
  if (out.numel() > 0) launch<gated_delta_rule_tiers>(qkv, "npu_ops::gated_delta_rule", params);
}

}  // namespace

NPU_OPS(m) {
  m.impl("selective_scan", TORCH_BOX(&selective_scan));
  m.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule));
}

}  // namespace npu_ops
