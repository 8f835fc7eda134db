// `x.data = y` between the CPU and the device: nn.Module.to() so keeps its parameters, ties and optimizers.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace npu {
namespace {

bool is_dense(const at::Tensor& tensor) {
  using c10::BackendComponent;
  constexpr c10::DispatchKeySet backends({BackendComponent::CPUBit, BackendComponent::PrivateUse1Bit});
  const c10::DispatchKeySet keys = tensor.key_set();
  return keys.has_any(backends) && keys.has_any(c10::DispatchKeySet(c10::DispatchKey::Dense));
}

// PyTorch lists the devices that it knows, and leaves it to the others to register this op.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return (is_dense(self) && is_dense(from)) || self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type); }

}  // namespace
}  // namespace npu
