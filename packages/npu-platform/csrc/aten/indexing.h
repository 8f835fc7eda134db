// Which devices the tensors of an indexing may lie on.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

namespace npu {

// Raises RuntimeError where cuda does: an index lies beside `self` or on the host, and `values`, if defined, beside `self`
// unless they are a single one of the host.
void check_devices_of_indexing(const at::Tensor& self, const c10::List<std::optional<at::Tensor>>& indices, const at::Tensor& values);

}  // namespace npu
