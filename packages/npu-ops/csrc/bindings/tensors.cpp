#include "bindings/tensors.h"

namespace npu_ops {
namespace {

bool collapse(const Tensor& t, Rows& rows) {
  // leading dimensions from the inside out; those that continue each other become one
  struct Group {
    int64_t size, stride;
  } groups[2];
  int n = 0;
  for (int64_t d = t.dim() - 2; d >= 0; --d) {
    const int64_t size = t.size(d), stride = t.stride(d);
    if (size == 1) continue;
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
