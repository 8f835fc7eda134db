#include "runtime/allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>

#include "runtime/caching_allocator.h"
#include "runtime/device.h"
#include "runtime/faults.h"
#include "runtime/launch.h"

namespace npu {
namespace {

void keep(void*) {}

using Entry = AllocationLog::Entry;

bool overlap(const Entry& one, const Entry& other) {
  const auto* first = static_cast<const char*>(one.address);
  const auto* second = static_cast<const char*>(other.address);
  return first < second + other.bytes && second < first + one.bytes;
}

// Whether memory of the entry is in use: an op that frees and allocates again has entries that lie on one another, and one
// whose allocations depend on its data may ask for them in another order than it did at capture.
bool is_in_use(const Entry& entry) {
  const auto& entries = thread_state.lend->entries;
  for (size_t i = 0; i < entries.size(); ++i) {
    if ((*thread_state.lent)[i] == Lent::in_use && overlap(entries[i], entry)) return true;
  }
  return false;
}

// An address that the running replay lends, or nullptr. By size and order: the same op asks for the same sizes.
void* borrow(size_t bytes) {
  const auto& entries = thread_state.lend->entries;
  auto& lent = *thread_state.lent;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (lent[i] == Lent::no && entries[i].bytes == bytes && !is_in_use(entries[i])) {
      lent[i] = Lent::in_use;
      return entries[i].address;
    }
  }
  return nullptr;
}

// Whether the address is one that the running replay lends; it is not in use any more then.
bool give_back(void* address) {
  if (C10_LIKELY(thread_state.lend == nullptr)) return false;
  const auto& entries = thread_state.lend->entries;
  bool is_lent = false;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].address != address) continue;
    is_lent = true;
    Lent& state = (*thread_state.lent)[i];
    if (state == Lent::in_use) state = Lent::given_back;
  }
  return is_lent;
}

void keep_lent(void* address) { give_back(address); }

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes, c10::Device label) {
  ThreadState& state = thread_state;
  if (bytes == 0) {
    check_device(device);
    return {nullptr, nullptr, &keep, label};
  }
  if (C10_UNLIKELY(state.lend != nullptr)) {
    if (void* address = borrow(bytes)) {
      if (is_watched()) note_allocation(address);
      return {address, address, &keep_lent, label};
    }
  }
  void* address = CachingAllocator::of(device).allocate(bytes, state.pool);
  if (C10_UNLIKELY(state.record != nullptr)) state.record->entries.push_back({address, bytes});
  return {address, address, &free_device_memory, label};
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex device = thread_state.device;
    return allocate_on(device, bytes, c10::Device(kNpu, device));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    MemoryScope open("a copy of a storage");
    submit_copy(target, source, bytes);
  }

  bool initialized() override { return device_count_or_zero() > 0; }
  void emptyCache(c10::MempoolId_t pool) override { release_cached_of_all(pool_of(pool)); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // see record_stream
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return CachingAllocator::of(device).stats();
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { CachingAllocator::of(device).reset_accumulated_stats(); }
  void resetPeakStats(c10::DeviceIndex device) override { CachingAllocator::of(device).reset_peak_stats(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    check_device(device);
    check_alive(device);
    size_t free = 0, total = 0;
    check(driver().memory_info(device, &free, &total));
    return {free, total};
  }
};

DeviceAllocator the_device_allocator;
const c10::AllocatorRegisterer<kNpu> registered(&the_device_allocator);

c10::Allocator* host_allocator = nullptr;

// oneDNN takes scratch through the raw interface, which frees by address alone.
void free_any(void* address) {
  if (give_back(address)) return;
  if (device_of(address) >= 0) {
    free_device_memory(address);
  } else {
    host_allocator->raw_deleter()(address);
  }
}

struct CpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (C10_LIKELY(thread_state.kernel_depth == 0)) return host_allocator->allocate(bytes);
    return allocate_on(thread_state.device, bytes, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
};

CpuAllocator the_cpu_allocator;

}  // namespace

c10::Allocator* device_allocator() { return &the_device_allocator; }

c10::Allocator* cpu_allocator() { return &the_cpu_allocator; }

void install_cpu_allocator() {
  if (host_allocator) return;
  host_allocator = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&the_cpu_allocator, /*priority=*/1);
}

LendScope::LendScope(const AllocationLog& log)
    : previous_log_(thread_state.lend), previous_lent_(thread_state.lent), lent_(log.entries.size()) {
  thread_state.lend = &log;
  thread_state.lent = &lent_;
}

LendScope::~LendScope() {
  thread_state.lend = previous_log_;
  thread_state.lent = previous_lent_;
}

}  // namespace npu
