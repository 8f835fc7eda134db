// Tensors as kernels see them: checked, with their addresses and strides in plain numbers.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "dispatch/tiers.h"

namespace npu_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#define NPU_CHECK(condition, ...) STD_TORCH_CHECK(condition, "npu_ops: ", __VA_ARGS__)

inline Dtype dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return Dtype::bf16;
    case ScalarType::Half:
      return Dtype::fp16;
    case ScalarType::Float:
      return Dtype::fp32;
    default:
      NPU_CHECK(false, name, " must be bfloat16, float16 or float32; convert it first.");
  }
}
inline int64_t size_of(Dtype d) { return d == Dtype::fp32 ? 4 : 2; }

inline bool is_int64(const Tensor& t) { return t.scalar_type() == ScalarType::Long; }
inline bool is_int32(const Tensor& t) { return t.scalar_type() == ScalarType::Int; }

inline void check_same_device(const Tensor& a, const Tensor& b, const char* name) {
  NPU_CHECK(a.device() == b.device(), name, " must be on the device of the first argument.");
}
inline void check_same_device(const Tensor& a, const std::optional<Tensor>& b, const char* name) {
  if (b) check_same_device(a, *b, name);
}
// Of ops that every layer calls: the device of the first is asked for once.
inline void check_one_device(const Tensor& first, std::initializer_list<const Tensor*> others) {
  const auto device = first.device();
  for (const Tensor* t : others) NPU_CHECK(t->device() == device, "every tensor must be on the device of the first argument.");
}
inline void check_same_dtype(const Tensor& a, const Tensor& b, const char* name) {
  NPU_CHECK(a.scalar_type() == b.scalar_type(), name, " must have the dtype of the first argument; convert it first.");
}
inline void check_dense_rows(const Tensor& t, const char* name) {
  NPU_CHECK(t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1, name, " must be contiguous in its last dimension; call contiguous().");
}
// What several elements of a tensor share would be written once for each of them.
inline void check_written(const Tensor& t, const char* name) {
  const auto sizes = t.sizes(), strides = t.strides();
  for (size_t d = 0; d < sizes.size(); ++d)
    NPU_CHECK(strides[d] != 0 || sizes[d] <= 1, name, " is written in place, so no dimension may be expanded, as ", d, " is; clone() it first.");
}
// The tensor itself, or a copy with contiguous rows.
inline Tensor with_dense_rows(const Tensor& t) {
  return t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1 ? t : torch::stable::contiguous(t);
}

// A contiguous tensor without values on the device of `like`, of its dtype if none is given.
Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef sizes, const Tensor& like, std::optional<ScalarType> dtype = std::nullopt);
inline std::vector<int64_t> sizes_of(const Tensor& t) { return std::vector<int64_t>(t.sizes().begin(), t.sizes().end()); }

// Rows of a tensor as (outer, inner) with two strides, when its leading dimensions collapse to that; a copy otherwise.
struct Rows {
  Tensor tensor;
  int64_t outer = 1, inner = 1, width = 1, stride_outer = 0, stride_inner = 0;
};
Rows rows_of(const Tensor& t);

}  // namespace npu_ops
