// What torch.profiler learns of the device: the kernels that ran while it recorded.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>

namespace npu::profiler {

namespace detail {
extern std::atomic<bool> recording;
}

inline bool is_recording() { return detail::recording.load(std::memory_order_relaxed); }

// Nanoseconds since the epoch, the clock of torch.profiler.
int64_t now();

// Adds a kernel that ran on this thread from `began` until now, for the op that the thread is in.
void record_kernel(c10::DeviceIndex device, const char* name, int64_t began);

}  // namespace npu::profiler
