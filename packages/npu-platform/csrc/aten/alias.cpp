#include "aten/alias.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/PyObjectSlot.h>

#include <algorithm>
#include <cstring>

#include "runtime/allocator.h"
#include "runtime/caching_allocator.h"
#include "runtime/device.h"

namespace npu {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::intrusive_ptr;
using c10::StorageImpl;
using c10::TensorImpl;

constexpr size_t kPooled = 64;  // aliases kept for reuse, by thread
constexpr size_t kFew = 256;    // tensors that are looked for one by one, which takes no longer than a table up to here

const DispatchKeySet kLazyBits({DispatchKey::Conjugate, DispatchKey::Negative});

// Fields of any TensorImpl that only a subclass may name: a pointer to member is taken through one. With it a fresh
// result becomes an npu tensor where it is, without a second TensorImpl.
struct Fields : TensorImpl {
  static DispatchKeySet& keys(TensorImpl& impl) { return impl.*(&Fields::key_set_); }
  static std::optional<c10::Device>& device(TensorImpl& impl) { return impl.*(&Fields::device_opt_); }
  static c10::Storage& storage(TensorImpl& impl) { return impl.*(&Fields::storage_); }
};

class AliasImpl final : public TensorImpl {
 public:
  AliasImpl(c10::Storage storage, caffe2::TypeMeta dtype)
      : TensorImpl(std::move(storage), DispatchKeySet(DispatchKey::CPU), dtype) {}

  // No autograd keys: kernels run below autograd.
  void retarget(const TensorImpl& original, c10::Storage storage, DispatchKey key) {
    TensorImpl::copy_generic_tensor_metadata(&original, this);
    storage_ = std::move(storage);
    key_set_ = DispatchKeySet(key) | (original.key_set() & kLazyBits);
    device_opt_ = storage_.device();
  }
};

struct ThreadPool {
  std::vector<intrusive_ptr<TensorImpl>> aliases;
  std::vector<intrusive_ptr<StorageImpl>> storages;
};
thread_local ThreadPool pooled;

c10::DataPtr borrowed(void* address, c10::DeviceType device = c10::kCPU) { return {address, c10::Device(device)}; }

void let_go(void* storage) { c10::raw::intrusive_ptr::decref(static_cast<StorageImpl*>(storage)); }

// The memory of `original`, with a reference to it.
c10::DataPtr shared(StorageImpl* original) {
  c10::raw::intrusive_ptr::incref(original);
  return {original->mutable_data(), original, &let_go, c10::Device(c10::kCPU)};
}

StorageImpl* storage_of(const TensorImpl& impl) { return impl.unsafe_storage().unsafeGetStorageImpl(); }

c10::DataPtr host_zeros(size_t bytes) {
  c10::DataPtr memory = cpu_allocator()->allocate(bytes);
  if (bytes) std::memset(memory.get(), 0, bytes);
  return memory;
}

intrusive_ptr<StorageImpl> alias_storage(StorageImpl* original, c10::DataPtr memory) {
  if (pooled.storages.empty()) {
    return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), original->nbytes(), std::move(memory),
                                            cpu_allocator(), /*resizable=*/true);
  }
  auto storage = std::move(pooled.storages.back());
  pooled.storages.pop_back();
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(original->nbytes());
  return storage;
}

intrusive_ptr<TensorImpl> alias_impl(const TensorImpl& original, c10::Storage storage) {
  intrusive_ptr<TensorImpl> alias;
  if (pooled.aliases.empty()) {
    alias = c10::make_intrusive<AliasImpl>(c10::Storage(storage), original.dtype());
  } else {
    alias = std::move(pooled.aliases.back());
    pooled.aliases.pop_back();
  }
  const DispatchKey key = storage.device_type() == c10::kMeta ? DispatchKey::Meta : DispatchKey::CPU;
  static_cast<AliasImpl*>(alias.get())->retarget(original, std::move(storage), key);
  return alias;
}

DispatchKeySet npu_keys(DispatchKeySet keys) {
  constexpr DispatchKeySet other_bits = DispatchKeySet(c10::BackendComponent::CPUBit) | DispatchKeySet(c10::BackendComponent::MetaBit);
  constexpr DispatchKeySet npu_bit(c10::BackendComponent::PrivateUse1Bit);
  const DispatchKeySet moved(DispatchKeySet::RAW, (keys.raw_repr() & ~other_bits.raw_repr()) | npu_bit.raw_repr());
  return (moved - DispatchKeySet(DispatchKey::AutocastCPU)) | DispatchKeySet(DispatchKey::AutocastPrivateUse1);
}

at::Tensor make_view(c10::Storage storage, DispatchKeySet keys, const TensorImpl& like) {
  auto view = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, std::move(storage), keys, like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return view;
}

}  // namespace

at::Tensor Aliases::of(const at::Tensor& tensor, bool is_written) {
  if (!tensor.defined()) return tensor;
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->device_type() != kNpu) {
    if (impl->device_type() == c10::kCPU) {
      host_beside_ |= impl->dim() > 0;
      if (!impl->has_storage()) return tensor;
      host_.push_back(storage_of(*impl));
      host_is_sorted_ = false;
    }
    return tensor;
  }
  const c10::DeviceIndex index = impl->device().index();
  TORCH_CHECK(device_ < 0 || device_ == index,
              "Expected all tensors to be on the same device, but found at least two devices, npu:", int(device_),
              " and npu:", int(index), "!");
  device_ = index;
  TORCH_CHECK_NOT_IMPLEMENTED(impl->has_storage(), "npu: this kind of tensor has no storage that a CPU kernel could use");
  StorageImpl* storage = storage_of(*impl);
  c10::Storage aliased;
  if (const Entry* entry = find(&Entry::original, impl, storage)) {
    if (entry->original.get() == impl) return at::Tensor(entry->alias);
    aliased = entry->alias->unsafe_storage();
  }
  if (!aliased) {
    c10::DataPtr memory = C10_LIKELY(kind_ == Kind::memory) ? borrowed(storage->mutable_data())
                          : kind_ == Kind::shapes           ? borrowed(nullptr, c10::kMeta)
                          : is_written                      ? host_zeros(storage->nbytes())
                                                            : borrowed(storage->mutable_data());
    aliased = c10::Storage(alias_storage(storage, std::move(memory)));
  }
  auto alias = alias_impl(*impl, std::move(aliased));
  entries_.push_back({tensor.getIntrusivePtr(), alias});
  return at::Tensor(std::move(alias));
}

// The entry of this tensor, else the first one whose tensor lies on this storage, else nullptr.
const Aliases::Entry* Aliases::find(Side side, const TensorImpl* impl, const StorageImpl* storage) {
  if (C10_UNLIKELY(entries_.size() > kFew)) return look_up(side, impl, storage);
  const Entry* sharing = nullptr;
  for (const Entry& entry : entries_) {
    const TensorImpl* here = (entry.*side).get();
    if (here == impl) return &entry;
    if (!sharing && storage_of(*here) == storage) sharing = &entry;
  }
  return sharing;
}

// The same where each of many tensors would have to be compared with each: the parameters of an optimizer.
const Aliases::Entry* Aliases::look_up(Side side, const TensorImpl* impl, const StorageImpl* storage) {
  if (!tables_) tables_ = std::make_unique<Tables>();
  Table& table = side == &Entry::alias ? tables_->aliases : tables_->originals;
  if (table.size == 0) table.places.reserve(4 * entries_.size());
  for (; table.size < entries_.size(); ++table.size) {
    const TensorImpl* here = (entries_[table.size].*side).get();
    table.places.emplace(here, table.size);
    table.places.emplace(storage_of(*here), table.size);
  }
  auto found = table.places.find(impl);
  if (found == table.places.end()) found = table.places.find(storage);
  return found == table.places.end() ? nullptr : &entries_[found->second];
}

bool Aliases::is_of_host(const StorageImpl* storage) {
  if (C10_LIKELY(host_.size() <= kFew)) return std::find(host_.begin(), host_.end(), storage) != host_.end();
  if (!std::exchange(host_is_sorted_, true)) std::sort(host_.begin(), host_.end());
  return std::binary_search(host_.begin(), host_.end(), storage);
}

void Aliases::check_one_device(const char* operation) const {
  TORCH_CHECK(device_ < 0 || !host_beside_, "Expected all tensors to be on the same device, but found at least two devices, npu:",
              int(device_), " and cpu! (in ", operation, ")");
}

bool Aliases::lie_on(const void* address) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [address](const Entry& entry) { return storage_of(*entry.original)->data() == address; });
}

at::Tensor Aliases::to_npu(at::Tensor&& result) {
  if (!result.defined()) return std::move(result);
  TensorImpl* impl = result.unsafeGetTensorImpl();
  if (impl->device_type() != (kind_ == Kind::shapes ? c10::kMeta : c10::kCPU)) return std::move(result);
  TORCH_CHECK_NOT_IMPLEMENTED(impl->has_storage() && !c10::isQIntType(result.scalar_type()),
                              "npu: its tensors are dense and not quantized, and this op gives a tensor of layout ",
                              result.layout(), " and dtype ", result.scalar_type(), "; take the tensor to the CPU first, with .cpu()");
  if (const Entry* entry = find(&Entry::alias, impl, storage_of(*impl))) {
    return entry->alias.get() == impl ? at::Tensor(entry->original) : view_of(*entry, *impl);
  }
  if (is_of_host(storage_of(*impl))) return std::move(result);
  return kind_ == Kind::memory ? adopt(std::move(result)) : materialize(result);
}

// A tensor of the device with the shape of `result`, whose contents do not count.
at::Tensor Aliases::materialize(const at::Tensor& result) {
  const TensorImpl& impl = *result.unsafeGetTensorImpl();
  const DeviceScope on(device().value_or(thread_state.device));
  const size_t bytes = result.storage().nbytes();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, device_allocator()->allocate(bytes), device_allocator(), /*resizable=*/true);
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), npu_keys(impl.key_set()), impl.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(impl.sizes(), impl.strides(), impl.storage_offset());
  return made;
}

// Built from the original's keys: with the CPU key alone it would look like an inference tensor ("Cannot set
// version_counter").
at::Tensor Aliases::view_of(const Entry& entry, const TensorImpl& result) {
  const DispatchKeySet keys = (entry.original->key_set() - kLazyBits) | (result.key_set() & kLazyBits);
  return make_view(c10::Storage(entry.original->unsafe_storage()), keys, result);
}

at::Tensor Aliases::adopt(at::Tensor&& result) {
  TensorImpl* impl = result.unsafeGetTensorImpl();
  StorageImpl* storage = storage_of(*impl);
  const void* address = storage->data();
  const c10::DeviceIndex index = address ? device_of(address) : thread_state.device;
  if (index < 0) {  // a kernel returned memory that it did not get from our allocator
    if (is_capturing()) refuse_during_capture("an op that returns host memory of its own");
    const at::Tensor host = result.contiguous();  // we are inside the kernel: a copy lies on the device
    auto copy = at::empty_like(host);
    submit_copy(copy.mutable_data_ptr(), host.const_data_ptr(), host.nbytes());
    return adopt(std::move(copy));
  }
  const c10::Device device(kNpu, index);
  if (storage->device().type() != kNpu) {
    storage->_mutable_data_ptr_no_checks().unsafe_set_device(device);
    storage->set_allocator(device_allocator());
  }
  if (result.use_count() > 1) return make_view(c10::Storage(impl->unsafe_storage()), npu_keys(impl->key_set()), *impl);
  Fields::keys(*impl) = npu_keys(impl->key_set());
  Fields::device(*impl) = device;
  return std::move(result);
}

void Aliases::write_back() {
  for (Entry& entry : entries_) write_back(entry);
}

void Aliases::write_back(Entry& entry) {
  TensorImpl& alias = *entry.alias;
  TensorImpl& original = *entry.original;
  StorageImpl* from = storage_of(alias);
  StorageImpl* to = storage_of(original);
  if (kind_ != Kind::memory) {
    if (from->nbytes() != to->nbytes()) {
      const DeviceScope on(to->device().index());
      to->set_data_ptr_noswap(device_allocator()->allocate(from->nbytes()));
      to->set_nbytes(from->nbytes());
    }
  } else if (from->data() != to->data() || from->nbytes() != to->nbytes()) {
    const size_t bytes = from->nbytes();
    c10::DataPtr memory = from->set_data_ptr(borrowed(nullptr));
    memory.unsafe_set_device(to->device());
    to->set_data_ptr_noswap(std::move(memory));
    to->set_nbytes(bytes);
    from->set_data_ptr_noswap(borrowed(to->mutable_data()));
  }
  if (original.storage_offset() != alias.storage_offset() || original.sizes() != alias.sizes() ||
      original.strides() != alias.strides()) {
    original.set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
  // A kernel may leave its result lazily conjugated, as linalg.lu_solve from the right does.
  if (original.is_conj() != alias.is_conj()) original._set_conj(alias.is_conj());
  if (original.is_neg() != alias.is_neg()) original._set_neg(alias.is_neg());
}

Aliases::~Aliases() {
  for (Entry& entry : entries_) recycle(entry);
}

void Aliases::recycle(Entry& entry) {
  TensorImpl& alias = *entry.alias;
  StorageImpl* original = storage_of(*entry.original);
  auto keep_memory = [&](StorageImpl* storage) {
    if (kind_ != Kind::shapes && storage && !storage->data_ptr().get_context() && !is_in_capture_pool(storage->data())) {
      storage->set_data_ptr_noswap(shared(original));
    }
  };
  const bool kept = entry.alias.use_count() > 1 || alias.pyobj_slot()->load_pyobj() != nullptr;
  if (kept) {
    keep_memory(storage_of(alias));
    entry.alias.reset();
    return;
  }
  auto storage = intrusive_ptr<StorageImpl>::reclaim(Fields::storage(alias).unsafeReleaseStorageImpl());
  if (storage.use_count() > 1) {
    keep_memory(storage.get());  // a tensor that the kernel kept lies on it, or an alias whose turn is to come
  } else if (pooled.storages.size() < kPooled) {
    storage->set_data_ptr_noswap(borrowed(nullptr));
    pooled.storages.push_back(std::move(storage));
  }
  if (pooled.aliases.size() < kPooled) pooled.aliases.push_back(std::move(entry.alias));
  entry.alias.reset();
}

at::Tensor owning_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kNpu) return tensor;
  TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  StorageImpl* original = storage_of(impl);
  auto memory = is_in_capture_pool(original->data()) ? borrowed(original->mutable_data()) : shared(original);
  auto storage = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), original->nbytes(), std::move(memory),
                                                  /*allocator=*/nullptr, /*resizable=*/false);
  const DispatchKeySet keys = DispatchKeySet(DispatchKey::CPU) | (impl.key_set() & kLazyBits);
  auto alias = at::detail::make_tensor<TensorImpl>(c10::Storage(std::move(storage)), keys, impl.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(impl.sizes(), impl.strides(), impl.storage_offset());
  return alias;
}

void AliasNode::expect(const at::Tensor& result) {
  expected_.push_back(result.defined() && result.has_storage() ? result.storage().data() : nullptr);
}

void AliasNode::run() {
  at::AutoDispatchBelowADInplaceOrView below;
  LendScope lending(log);
  std::vector<at::Tensor> results;
  run_kernel(&results);
  for (size_t i = 0; i < results.size() && i < expected_.size(); ++i) {
    const at::Tensor& result = results[i];
    const void* address = result.defined() && result.has_storage() ? result.storage().data() : nullptr;
    TORCH_CHECK(address == expected_[i], "npu: ", name(),
                " allocated its result differently on replay: an op whose result's shape depends on its data cannot be in a graph");
  }
}

}  // namespace npu
