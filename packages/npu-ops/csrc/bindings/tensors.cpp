#include "bindings/tensors.h"

namespace npu_ops {
namespace {

bool collapse(const Tensor& t, Rows& rows) {
  // leading dimensions from the inside out; those that continue each other become one
  struct Group {
    int64_t size, stride;
  } groups[2];
  int n = 0;
  const auto sizes = t.sizes(), strides = t.strides();
  for (size_t d = sizes.size() - 1; d-- > 0;) {
    const int64_t size = sizes[d], stride = strides[d];
    if (size == 1) continue;
    if (size == 0) {  // no rows, whatever the strides
      rows.inner = 0;
      return true;
    }
    if (n > 0 && stride == groups[n - 1].size * groups[n - 1].stride) {
      groups[n - 1].size *= size;
    } else if (n < 2) {
      groups[n++] = {size, stride};
    } else {
      return false;
    }
  }
  if (n > 0) rows.inner = groups[0].size, rows.stride_inner = groups[0].stride;
  if (n > 1) rows.outer = groups[1].size, rows.stride_outer = groups[1].stride;
  return true;
}

}  // namespace

// Straight to the device: torch::stable::new_empty goes through the dispatcher with boxed arguments, which took a quarter of the time
// of an op on one row.
Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef sizes, const Tensor& like, std::optional<ScalarType> dtype) {
  constexpr size_t kMost = 64;
  NPU_CHECK(sizes.size() <= kMost, "expected at most ", kMost, " dimensions, got ", sizes.size(), ".");
  int64_t strides[kMost], stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d] > 1 ? sizes[d] : 1) strides[d] = stride;
  int32_t type = 0, device = 0, index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  if (dtype) {
    type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*dtype));
  } else {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &type));
  }
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides, type, device, index, &made));
  return Tensor(made);
}

Rows rows_of(const Tensor& t) {
  NPU_CHECK(t.dim() >= 1, "expected at least one dimension, got a scalar.");
  Rows rows;
  rows.tensor = with_dense_rows(t);
  rows.width = t.size(t.dim() - 1);
  if (!collapse(rows.tensor, rows)) {
    rows.tensor = torch::stable::contiguous(t);
    collapse(rows.tensor, rows);
  }
  return rows;
}

}  // namespace npu_ops
