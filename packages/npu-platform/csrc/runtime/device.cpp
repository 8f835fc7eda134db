#include "runtime/device.h"

#include <c10/util/Exception.h>

namespace npu {

thread_local ThreadState thread_state __attribute__((tls_model("initial-exec")));

int device_count() {
  driver();
  return detail::device_count;
}

int device_count_or_zero() noexcept {
  try {
    return device_count();
  } catch (const c10::Error&) {
    return 0;
  }
}

void refuse_device(int index) {
  TORCH_CHECK(false, "npu: invalid device ordinal ", index, ": ", device_count(),
              " visible; see ", is_of_a_vendor() ? "" : "NPU_SIMULATOR_DEVICES and ", "NPU_VISIBLE_DEVICES");
}

c10::DeviceIndex index_of(c10::Device device) {
  const c10::DeviceIndex index = device.has_index() ? device.index() : thread_state.device;
  check_device(index);
  return index;
}

}  // namespace npu
