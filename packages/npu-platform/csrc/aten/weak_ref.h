// Non-owning views.
#pragma once

#include <ATen/core/Tensor.h>

namespace npu {

at::Tensor weak_ref_tensor(const at::Tensor& tensor);

// Defines torch.ops._C.weak_ref_tensor unless somebody has.
void define_weak_ref_tensor();

}  // namespace npu
