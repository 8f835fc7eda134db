#include "runtime/faults.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdio>
#include <thread>

#include "runtime/caching_allocator.h"
#include "runtime/device.h"

namespace npu {
namespace {


// What this thread allocated last, youngest at next - 1, and what its kernel returned.
struct Recent {
  std::array<void*, 32> allocations{};
  size_t next = 0;
  void* result = nullptr;
  size_t result_bytes = 0;
};
thread_local Recent recent;

[[noreturn]] void raise(npu_status status, const std::string& text) {
  throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, int32_t(status), text);
}

std::string npu_name(c10::DeviceIndex device) { return "npu:" + std::to_string(int(device)); }

// A collective: the kernels of ops have a namespace, those of the process group have none.
bool is_collective(std::string_view kernel) { return kernel.find("::") == std::string_view::npos; }

void wait(std::chrono::nanoseconds delay) {
  if (delay.count() > 0) std::this_thread::sleep_for(delay);
}

struct Range {
  char* address = nullptr;
  size_t bytes = 0;
};

// The kernel's result; else the youngest tensor of this thread that is alive; else any tensor of the device.
Range memory_to_flip(c10::DeviceIndex device, uint64_t random) {
  if (recent.result_bytes && device_of(recent.result) == device) return {static_cast<char*>(recent.result), recent.result_bytes};
  auto& allocator = CachingAllocator::of(device);
  for (size_t i = 1; i <= recent.allocations.size(); ++i) {
    void* address = recent.allocations[(recent.next - i) % recent.allocations.size()];
    if (!address || device_of(address) != device) continue;
    if (const size_t bytes = allocator.requested_of(address)) return {static_cast<char*>(address), bytes};
  }
  const auto live = allocator.live();
  if (live.empty()) return {};
  const auto& [address, bytes] = live[random % live.size()];
  return {static_cast<char*>(address), bytes};
}

}  // namespace

void check_alive(c10::DeviceIndex device) {
  if (!is_watched(kWatchFaults) || device < 0 || device >= NPU_MAX_DEVICES) return;
  if (auto why = Faults::instance().why_lost(device)) {
    raise(NPU_ERROR_DEVICE_LOST, "npu: device " + npu_name(device) + " is lost (" + *why +
                                     "): everything on it fails until torch.npu.faults.reset_device(" +
                                     std::to_string(int(device)) + "), which loses the contents of its memory");
  }
}

PendingFlip meet_launch_faults(c10::DeviceIndex device, const char* kernel) {
  check_alive(device);
  recent.result_bytes = 0;
  auto verdict = Faults::instance().at_launch(device, kernel);
  wait(verdict.delay);
  check_alive(device);
  if (verdict.failed) {
    raise(NPU_ERROR_LAUNCH_FAILED, "npu: kernel " + std::string(kernel) + " failed on " + npu_name(device) + ": fault on demand '" +
                                       *verdict.failed + "', of NPU_DEBUG or torch.npu.faults");
  }
  if (is_collective(kernel)) wait(Faults::instance().at_transfer(device));
  return {std::move(verdict.flip), verdict.random};
}

void flip_bit(c10::DeviceIndex device, const char* kernel, const PendingFlip& flip) noexcept {
  const Range memory = memory_to_flip(device, flip.random);
  if (!memory.bytes) return;
  const size_t bit = (flip.random >> 8) % (memory.bytes * 8);
  memory.address[bit / 8] = char(memory.address[bit / 8] ^ (1 << (bit % 8)));
  char address[32];
  std::snprintf(address, sizeof address, "%p", static_cast<void*>(memory.address));
  Faults::instance().note(*flip.fault, "bit " + std::to_string(bit % 8) + " of byte " + std::to_string(bit / 8) + " of the " +
                                           std::to_string(memory.bytes) + " bytes at " + address + ", after " + kernel + " on " +
                                           npu_name(device));
}

void meet_transfer_faults(c10::DeviceIndex device) {
  if (is_watched(kWatchFaults)) wait(Faults::instance().at_transfer(device));
}

std::optional<std::string> meet_allocation_faults(c10::DeviceIndex device) {
  if (!is_watched(kWatchFaults)) return std::nullopt;
  check_alive(device);
  return Faults::instance().at_allocation(device);
}

void note_allocation(void* address) {
  recent.allocations[recent.next % recent.allocations.size()] = address;
  ++recent.next;
}

void note_result(void* address, size_t bytes) {
  recent.result = address;
  recent.result_bytes = bytes;
}

void reset_device(c10::DeviceIndex device) {
  check_device(device);
  check(driver().device_reset(device));
  CachingAllocator::of(device).renew_fences();
  Faults::instance().reset(device);
}

}  // namespace npu
