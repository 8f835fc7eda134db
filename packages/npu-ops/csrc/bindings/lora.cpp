#include "kernels/lora/lora.h"

#include <algorithm>

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

// A stack of adapters' weights, [adapters, rows, k] or [adapters, 1, rows, k].
LoraSlice slice_of(const Tensor& stack, const Tensor& like, int64_t adapters, int64_t k) {
  const int64_t dims = stack.dim();
  NPU_CHECK((dims == 3 || (dims == 4 && stack.size(1) == 1)) && stack.size(0) == adapters && stack.size(dims - 1) == k,
            "lora: weights must be stacks [", adapters, ", 1, rows, ", k, "], as many adapters in each.");
  check_same_dtype(like, stack, "weights");
  check_same_device(like, stack, "weights");
  check_dense_rows(stack, "weights");
  return {stack.data_ptr(), stack.size(dims - 2), stack.stride(0), stack.stride(dims - 2), 0};
}

void check_indices(const Tensor& indices, const Tensor& like, int64_t tokens) {
  NPU_CHECK(indices.dim() == 1 && is_int64(indices) && indices.is_contiguous() && indices.size(0) >= tokens,
            "lora: indices must be contiguous int64 with at least ", tokens, " elements, one a token.");
  check_same_device(like, indices, "indices");
}

// The products of the slices, float32 [slices, tokens, rank].
void check_products(const Tensor& t, const Tensor& like, int64_t slices, int64_t tokens, const char* name) {
  NPU_CHECK(t.dim() == 3 && t.size(0) == slices && t.size(1) == tokens && t.scalar_type() == ScalarType::Float && t.stride(2) == 1,
            "lora: ", name, " must be float32 [", slices, ", ", tokens, ", rank].");
  check_same_device(like, t, name);
}

void check_slices(const std::vector<Tensor>& weights) {
  NPU_CHECK(!weights.empty() && weights.size() <= kLoraSlices, "lora: from 1 to ", kLoraSlices, " weights can be given, got ", weights.size(), ".");
}

void lora_shrink(Tensor y, Tensor x, std::vector<Tensor> weights, Tensor indices, double scale) {
  check_slices(weights);
  NPU_CHECK(x.dim() == 2, "lora_shrink: x must be [tokens, hidden].");
  x = with_dense_rows(x);
  const int64_t slices = static_cast<int64_t>(weights.size()), tokens = x.size(0), hidden = x.size(1), adapters = weights[0].size(0);
  check_indices(indices, x, tokens);
  check_products(y, x, slices, tokens, "y");
  check_written(y, "y");
  LoraShrinkParams params{static_cast<float*>(y.data_ptr()), x.data_ptr(), static_cast<const int64_t*>(indices.data_ptr()), {}, slices, tokens,
                          hidden, adapters, x.stride(0), y.stride(0), y.stride(1), static_cast<float>(scale), dtype_of(x, "x")};
  for (int64_t i = 0; i < slices; ++i) {
    params.slices[i] = slice_of(weights[i], x, adapters, hidden);
    NPU_CHECK(params.slices[i].rows == y.size(2), "lora_shrink: each weight must have y's rank of ", y.size(2), ", got ", params.slices[i].rows, ".");
  }
  if (tokens > 0 && y.size(2) > 0) launch<lora_shrink_tiers>(x, "npu_ops::lora_shrink", params);
}

void lora_expand(Tensor y, Tensor x, std::vector<Tensor> weights, Tensor indices, std::vector<int64_t> columns, int64_t offset, bool add) {
  check_slices(weights);
  NPU_CHECK(y.dim() == 2 && columns.size() == weights.size(), "lora_expand: y must be [tokens, columns], and columns say how many each weight has.");
  check_dense_rows(y, "y");
  check_written(y, "y");
  const int64_t slices = static_cast<int64_t>(weights.size()), tokens = y.size(0), adapters = weights[0].size(0);
  check_indices(indices, y, tokens);
  check_products(x, y, slices, tokens, "x");
  LoraExpandParams params{y.data_ptr(), static_cast<const float*>(x.data_ptr()), static_cast<const int64_t*>(indices.data_ptr()), {}, slices, tokens,
                          x.size(2), adapters, y.stride(0), x.stride(0), x.stride(1), dtype_of(y, "y"), add};
  for (int64_t i = 0; i < slices; ++i) {
    params.slices[i] = slice_of(weights[i], y, adapters, x.size(2));
    params.slices[i].rows = std::min(params.slices[i].rows, columns[i]);
    params.slices[i].column = offset;
    offset += columns[i];
    NPU_CHECK(params.slices[i].column >= 0 && params.slices[i].column + params.slices[i].rows <= y.size(1), "lora_expand: columns ",
              params.slices[i].column, " to ", params.slices[i].column + params.slices[i].rows, " are outside of y's ", y.size(1), ".");
  }
  if (tokens > 0) launch<lora_expand_tiers>(y, "npu_ops::lora_expand", params);
}

}  // namespace

NPU_OPS(m) {
  m.impl("lora_shrink", TORCH_BOX(&lora_shrink));
  m.impl("lora_expand", TORCH_BOX(&lora_expand));
}

}  // namespace npu_ops
