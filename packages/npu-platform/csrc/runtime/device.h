// Devices as PyTorch sees them.
#pragma once

#include <c10/core/Device.h>

#include "runtime/driver.h"
#include "runtime/thread_state.h"

namespace npu {

int device_count();            // raises on a bad environment
int device_count_or_zero() noexcept;
[[noreturn]] void refuse_device(int index);
// Raises when there is no such device.
inline void check_device(int index) {
  if (C10_LIKELY(index >= 0 && index < detail::device_count)) return;
  if (index < 0 || index >= device_count()) refuse_device(index);
}

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
