// Tensors and views: the ops that make or reshape npu tensors without computing.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "aten/alias.h"
#include "runtime/allocator.h"
#include "runtime/caching_allocator.h"
#include "runtime/device.h"
#include "runtime/resize.h"

namespace npu {
namespace {

using at::Tensor;
using c10::IntArrayRef;
using std::optional;

constexpr c10::DispatchKeySet kNpuKeys(c10::DispatchKey::PrivateUse1);

DeviceScope on(optional<c10::Device> device) { return DeviceScope(index_of(device.value_or(c10::Device(kNpu)))); }

void check_options(optional<c10::Layout> layout, optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "npu: only strided tensors can be allocated this way");
}

// torch.use_deterministic_algorithms: memory without values gets known ones.
Tensor uninitialized(Tensor&& tensor) {
  const auto& context = at::globalContext();
  if (C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())) {
    at::native::fill_empty_deterministic_(tensor);
  }
  return std::move(tensor);
}

Tensor empty(IntArrayRef size, optional<c10::ScalarType> dtype, optional<c10::Layout> layout,
             optional<c10::Device> device, optional<bool> pinned, optional<c10::MemoryFormat> format) {
  check_options(layout, pinned);
  const auto scope = on(device);
  return uninitialized(at::detail::empty_generic(size, device_allocator(), kNpuKeys, c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<c10::ScalarType> dtype,
                     optional<c10::Layout> layout, optional<c10::Device> device, optional<bool> pinned) {
  check_options(layout, pinned);
  const auto scope = on(device);
  return uninitialized(
      at::detail::empty_strided_generic(size, stride, device_allocator(), kNpuKeys, c10::dtype_or_default(dtype)));
}

// ---- views ----
Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

// ---- storage ----
size_t bytes_for(const Tensor& tensor, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  const bool is_empty = std::any_of(size.begin(), size.end(), [](int64_t each) { return each <= 0; });
  const bool is_wrong = offset < 0 || std::any_of(stride.begin(), stride.end(), [](int64_t each) { return each < 0; });
  if (is_empty || is_wrong) return 0;
  if (stride.size() == size.size()) return at::detail::computeStorageNbytes(size, stride, tensor.itemsize(), size_t(offset));
  return at::detail::computeStorageNbytesContiguous(size, tensor.itemsize(), size_t(offset));
}

// Before PyTorch does it by itself, with a copy on the host that no stream and no graph knows of. It refuses storages of the host.
void make_room(const c10::Storage& storage, size_t bytes) {
  if (bytes > storage.nbytes() && storage.device_type() == kNpu) resize_storage(*storage.unsafeGetStorageImpl(), bytes, "aten::resize_");
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<c10::MemoryFormat> format) {
  const auto before = int64_t(self.storage().nbytes());
  if (self.sizes() != size) make_room(self.storage(), bytes_for(self, self.storage_offset(), size, {}));
  at::native::resize_(self, size, format);
  const auto& context = at::globalContext();
  if (C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())) {
    at::native::fill_resize_deterministic_(self, before);
  }
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_storage_strided(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  if (self.sizes() != size || self.strides() != stride) make_room(source, bytes_for(self, offset, size, stride));
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_empty(Tensor& self) {
  const DeviceScope scope(self.device().index());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return self.set_(std::move(none), 0, {0});
}
bool is_set_to(const Tensor& self, const Tensor& other) { return at::native::is_set_to(self, other); }

void record_stream(Tensor& self, at::Stream stream) {
  void* address = self.storage().mutable_data();
  if (!may_run_behind() || device_of(address) != self.device().index()) return;
  CachingAllocator::of(self.device().index()).note_use(address, {stream.device_index(), stream.id()});
}

// Large memory fresh from the driver is zero already: a KV cache costs host memory only as its blocks are used.
bool is_zero_by_nature(const Tensor& self) {
  constexpr size_t kWorthIt = size_t(32) << 20;
  return self.nbytes() >= kWorthIt && self.storage_offset() == 0 && self.storage().nbytes() == self.nbytes() &&
         CachingAllocator::of(self.device().index()).take_untouched(self.mutable_data_ptr());
}

void discard(const Tensor& self) {
  char* address = static_cast<char*>(self.mutable_data_ptr());
  const size_t head = (NPU_MEMORY_GRANULE - size_t(address) % NPU_MEMORY_GRANULE) % NPU_MEMORY_GRANULE;
  const size_t whole = (self.nbytes() - head) / NPU_MEMORY_GRANULE * NPU_MEMORY_GRANULE;
  std::memset(address, 0, head);
  check(driver().memory_discard(self.device().index(), address + head, whole));
  std::memset(address + head + whole, 0, self.nbytes() - head - whole);
}

Tensor& zero_(Tensor& self) {
  if (self.is_non_overlapping_and_dense() && !is_capturing()) {
    const bool by_nature = is_zero_by_nature(self);
    launch(self.device().index(), "aten::zero_", [&self, by_nature] {
      if (by_nature) return discard(self);
      if (self.nbytes()) std::memset(self.mutable_data_ptr(), 0, self.nbytes());
      note_result_of_kernel(self);
    });
  } else {
    launch_on_aliases("aten::zero_", {self}, [](const AliasedTensors& aliases) {
      Tensor alias = aliases[0];
      return alias.zero_();
    });
  }
  return self;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_strided);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("is_set_to", is_set_to);
  m.impl("record_stream", record_stream);
  m.impl("zero_", zero_);
}

}  // namespace npu
