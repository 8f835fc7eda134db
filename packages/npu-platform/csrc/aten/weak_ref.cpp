// weak_ref_tensor: a view that does not keep its memory alive. vLLM holds the outputs of captured graphs by it, so that
// the graphs may reuse their memory.
#include "aten/weak_ref.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace npu {

at::Tensor weak_ref_tensor(const at::Tensor& tensor) {
  c10::StorageImpl* original = tensor.storage().unsafeGetStorageImpl();
  c10::Storage storage(c10::Storage::use_byte_size_t(), original->nbytes(),
                       c10::DataPtr(original->mutable_data(), original->device()), /*allocator=*/nullptr,
                       /*resizable=*/false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                       tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

void define_weak_ref_tensor() {
  if (c10::Dispatcher::singleton().findSchema({"_C::weak_ref_tensor", ""})) return;
  static auto* library = new torch::Library(torch::Library::FRAGMENT, "_C", std::nullopt, __FILE__, __LINE__);
  library->def("weak_ref_tensor(Tensor input) -> Tensor");
}

// vLLM looks the op up in torch.ops._C, which its own native library may define before or after us: the implementation
// waits for whichever definition comes.
TORCH_LIBRARY_IMPL(_C, PrivateUse1, m) { m.impl("weak_ref_tensor", weak_ref_tensor); }

}  // namespace npu
