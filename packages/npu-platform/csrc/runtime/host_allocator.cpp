#include "runtime/host_allocator.h"

#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "runtime/driver.h"

namespace npu {
namespace {

constexpr size_t kLeastBlock = 4096;

// Pinned memory of the driver's, in blocks of powers of two that are kept for reuse until empty_cache().
class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    const size_t size = std::bit_ceil(std::max(bytes, kLeastBlock));
    std::lock_guard lock(mutex_);
    void* address = take_cached(size);
    if (!address) {
      check(driver().host_allocate(size, &address));
      stats_.num_host_alloc++;
      stats_.allocations.increase(1);
      stats_.allocated_bytes.increase(size);
    }
    in_use_[static_cast<char*>(address)] = size;
    stats_.active_requests.increase(1);
    stats_.active_bytes.increase(size);
    return {address, address, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // see record_stream

  void empty_cache() override {
    std::lock_guard lock(mutex_);
    for (auto& [size, blocks] : cached_) {
      for (void* address : blocks) {
        driver().host_free(address);
        stats_.num_host_free++;
        stats_.allocations.decrease(1);
        stats_.allocated_bytes.decrease(size);
      }
    }
    cached_.clear();
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
    auto after = in_use_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == in_use_.begin()) return false;
    const auto& [begin, size] = *std::prev(after);
    return static_cast<const char*>(address) < begin + size;
  }

 private:
  static void release(void* address);

  void* take_cached(size_t size) {
    auto& blocks = cached_[size];
    if (blocks.empty()) return nullptr;
    void* address = blocks.back();
    blocks.pop_back();
    return address;
  }

  void give_back(void* address) {
    std::lock_guard lock(mutex_);
    auto block = in_use_.find(static_cast<char*>(address));
    stats_.active_requests.decrease(1);
    stats_.active_bytes.decrease(block->second);
    cached_[block->second].push_back(address);
    in_use_.erase(block);
  }

  std::array<c10::CachingAllocator::Stat*, 4> all_stats() {
    return {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations, &stats_.allocated_bytes};
  }

  std::mutex mutex_;
  std::map<char*, size_t> in_use_;
  std::unordered_map<size_t, std::vector<void*>> cached_;
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

}  // namespace npu
