#include "runtime/host_allocator.h"

#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "runtime/driver.h"
#include "runtime/forks.h"
#include "runtime/stream_uses.h"

namespace npu {
namespace {

constexpr size_t kLeastBlock = 4096;
constexpr size_t kLargeBlock = size_t(1) << 20;

// Powers of two, which are soon asked for again, and whole pages for what is large.
size_t block_size(size_t bytes) {
  if (bytes <= kLargeBlock) return std::bit_ceil(std::max(bytes, kLeastBlock));
  return (bytes + kLeastBlock - 1) / kLeastBlock * kLeastBlock;
}

// Pinned memory of the driver's, in blocks that are kept for reuse until empty_cache(). The driver, which may take its time to
// pin, is called without the lock.
class HostAllocator final : public at::HostAllocator {
 public:
  HostAllocator() { hold_in_forks(mutex_); }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    void* address = take_cached(block_size(bytes));
    if (!address) address = take_new(block_size(bytes));
    return {address, address, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool record_event(void* address, void*, c10::Stream stream) override { return note_use(address, {stream.device_index(), stream.id()}); }

  void empty_cache() override {
    for (const auto& [size, address] : forget_cached()) driver().host_free(address);
  }

  at::HostStats get_stats() override {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_accumulated_stats() override {
    std::lock_guard lock(mutex_);
    for (auto* stat : all_stats()) stat->reset_accumulated();
  }
  void reset_peak_stats() override {
    std::lock_guard lock(mutex_);
    for (auto* stat : all_stats()) stat->reset_peak();
  }

  bool owns(const void* address) {
    std::lock_guard lock(mutex_);
    return block_around(address) != nullptr;
  }

  // The block at this address, if it is ours, is not used again before what the stream has been given is done.
  bool note_use(const void* address, StreamName stream) {
    std::lock_guard lock(mutex_);
    char* block = block_around(address);
    if (block) uses_.note(block, stream);
    return block != nullptr;
  }

 private:
  static void release(void* address);

  using Blocks = std::multimap<size_t, void*>;  // by size

  char* block_around(const void* address) {
    auto after = in_use_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == in_use_.begin()) return nullptr;
    const auto& [begin, size] = *std::prev(after);
    return static_cast<const char*>(address) < begin + size ? begin : nullptr;
  }

  // A block that was used before and is at most an eighth too large, or nullptr.
  void* take_cached(size_t size) {
    std::lock_guard lock(mutex_);
    settle();
    const auto fit = cached_.lower_bound(size);
    if (fit == cached_.end() || fit->first - size > size / 8) return nullptr;
    const auto [whole, address] = *fit;
    cached_.erase(fit);
    hold(address, whole);
    return address;
  }

  // When the host has none left, what is cached goes first, and what streams still use is waited for.
  void* take_new(size_t size) {
    void* address = nullptr;
    npu_status status = driver().host_allocate(size, &address);
    if (status == NPU_ERROR_OUT_OF_MEMORY) {
      wait_for_uses();
      empty_cache();
      status = driver().host_allocate(size, &address);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, status != NPU_ERROR_OUT_OF_MEMORY, last_error(status), "; free pinned tensors, or pin less");
    check(status);
    if (!address) detail::refuse_answer("host_allocate", "memory, not NULL");
    std::lock_guard lock(mutex_);
    stats_.num_host_alloc++;
    stats_.allocations.increase(1);
    stats_.allocated_bytes.increase(size);
    hold(address, size);
    return address;
  }

  void wait_for_uses() {
    std::lock_guard lock(mutex_);
    uses_.wait();
  }

  void hold(void* address, size_t size) {
    in_use_[static_cast<char*>(address)] = size;
    stats_.active_requests.increase(1);
    stats_.active_bytes.increase(size);
  }

  void give_back(void* address) {
    std::lock_guard lock(mutex_);
    if (!uses_.defer(address)) cache(address);
  }

  void settle() {
    for (void* address : uses_.take_done()) cache(address);
  }

  void cache(void* address) {
    auto block = in_use_.find(static_cast<char*>(address));
    stats_.active_requests.decrease(1);
    stats_.active_bytes.decrease(block->second);
    cached_.emplace_hint(cached_.lower_bound(block->second), block->second, address);  // before its like: it is in the cache still
    in_use_.erase(block);
  }

  Blocks forget_cached() {
    std::lock_guard lock(mutex_);
    settle();
    for (const auto& [size, address] : cached_) {
      stats_.num_host_free++;
      stats_.allocations.decrease(1);
      stats_.allocated_bytes.decrease(size);
    }
    return std::exchange(cached_, {});
  }

  std::array<c10::CachingAllocator::Stat*, 4> all_stats() {
    return {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations, &stats_.allocated_bytes};
  }

  std::mutex mutex_;
  std::map<char*, size_t> in_use_;
  Blocks cached_;
  StreamUses uses_;
  at::HostStats stats_;
};

HostAllocator& instance() {
  static auto* allocator = new HostAllocator;  // leaked: pinned tensors may outlive static storage
  return *allocator;
}

void HostAllocator::release(void* address) {
  if (address) instance().give_back(address);
}

const at::HostAllocatorRegistry<kNpu> registered(&instance());

}  // namespace

at::HostAllocator* host_allocator() { return &instance(); }

bool is_pinned(const void* address) { return instance().owns(address); }

void note_pinned_use(const void* address, StreamName stream) { instance().note_use(address, stream); }

}  // namespace npu
