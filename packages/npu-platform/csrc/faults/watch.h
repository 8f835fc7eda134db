// The one flag that allocations and launches look at: whether anything but the ordinary is to be done.
#pragma once

#include <atomic>
#include <cstdint>

namespace npu {

enum Watch : uint32_t {
  kWatchFaults = 1,  // a fault is armed, or a device is lost
  kWatchMemory = 2,  // NPU_DEBUG=memory
};

inline std::atomic<uint32_t> watch_bits{0};

inline bool is_watched() { return __builtin_expect(watch_bits.load(std::memory_order_relaxed) != 0, 0); }
inline bool is_watched(Watch what) { return (watch_bits.load(std::memory_order_relaxed) & what) != 0; }

}  // namespace npu
