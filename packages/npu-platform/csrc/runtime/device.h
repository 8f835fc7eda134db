// Devices as PyTorch sees them, and the driver's status codes as exceptions.
#pragma once

#include <c10/core/Device.h>

#include "runtime/thread_state.h"

namespace npu {

// Raises RuntimeError with the driver's sentence (OutOfMemoryError is raised by the allocator alone).
void check(npu_status status);

int device_count();            // raises on a bad environment
int device_count_or_zero() noexcept;
void check_device(c10::DeviceIndex index);

// The index of `device`, or the current one when it has none; raises when there is no such device.
c10::DeviceIndex index_of(c10::Device device);

class DeviceScope {
 public:
  explicit DeviceScope(c10::DeviceIndex index) : previous_(thread_state.device) { thread_state.device = index; }
  ~DeviceScope() { thread_state.device = previous_; }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  c10::DeviceIndex previous_;
};

}  // namespace npu
