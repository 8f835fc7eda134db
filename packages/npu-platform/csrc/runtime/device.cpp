#include "runtime/device.h"

#include <c10/util/Exception.h>

namespace npu {

thread_local ThreadState thread_state __attribute__((tls_model("initial-exec")));

void check(npu_status status) { TORCH_CHECK(status == NPU_OK, npu_last_error()); }

int device_count() {
  int count = 0;
  check(npu_device_count(&count));
  return count;
}

int device_count_or_zero() noexcept {
  int count = 0;
  return npu_device_count(&count) == NPU_OK ? count : 0;
}

void check_device(c10::DeviceIndex index) {
  const int count = device_count();
  TORCH_CHECK(index >= 0 && index < count, "npu: invalid device ordinal ", int(index), ": ", count,
              " visible; see NPU_SIMULATOR_DEVICES and NPU_VISIBLE_DEVICES");
}

c10::DeviceIndex index_of(c10::Device device) {
  const c10::DeviceIndex index = device.has_index() ? device.index() : thread_state.device;
  check_device(index);
  return index;
}

}  // namespace npu
