// The driver of this process, chosen at its first use: the simulator, the null device or a vendor's library.
#pragma once

#include <c10/core/Device.h>
#include <c10/macros/Macros.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>

#include "include/npu_driver.h"
#include "runtime/thread_state.h"

namespace npu {

namespace detail {

struct DeviceRange {
  const char* base = nullptr;
  size_t span = 0;
};

extern std::atomic<const npu_driver*> driver;
extern std::array<DeviceRange, NPU_MAX_DEVICES> ranges;
extern int device_count;

const npu_driver& open_driver();  // raises RuntimeError for a driver that cannot be had, and again at each call

}  // namespace detail

// The driver, which may not be initialized yet, and then is read from the environment. Raises RuntimeError when it cannot be had.
const npu_driver& chosen_driver();

inline bool is_initialized() { return detail::driver.load(std::memory_order_acquire) != nullptr; }

inline const npu_driver& driver() {
  const npu_driver* open = detail::driver.load(std::memory_order_acquire);
  return C10_LIKELY(open != nullptr) ? *open : detail::open_driver();
}

// Raises RuntimeError with the driver's sentence, torch.AcceleratorError for a failed kernel and a lost device
// (OutOfMemoryError is raised by the allocator alone).
void check(npu_status status);

// Whether kernels run. Without, an op makes its results from shapes alone.
inline bool computes() { return (driver().capabilities & NPU_DRIVER_COMPUTES) != 0; }

// The device that owns this address, or -1.
inline c10::DeviceIndex device_of(const void* address) {
  if (!is_initialized()) return -1;
  for (int i = 0; i < detail::device_count; ++i) {
    const auto& range = detail::ranges[size_t(i)];
    if (size_t(static_cast<const char*>(address) - range.base) < range.span) return c10::DeviceIndex(i);
  }
  return -1;
}

// Hands a kernel of host code to the driver, for the thread's current stream. The driver runs it before this returns, or,
// where it does not compute, never. Raises what the kernel raises.
template <class Kernel>
void submit(c10::DeviceIndex device, const char* name, Kernel& kernel) {
  struct Call {
    Kernel* kernel;
    std::exception_ptr error;
  } call{&kernel, nullptr};
  auto run = [](void* closure) noexcept {
    auto& call = *static_cast<Call*>(closure);
    try {
      (*call.kernel)();
    } catch (...) {
      call.error = std::current_exception();
    }
  };
  const npu_status status = driver().launch(device, thread_state.stream[size_t(device)], name, run, &call);
  if (C10_UNLIKELY(call.error != nullptr)) std::rethrow_exception(std::move(call.error));
  if (C10_UNLIKELY(status != NPU_OK)) check(status);
}

// Copies bytes on the thread's current stream, memory of the host and of devices alike.
void submit_copy(void* target, const void* source, size_t bytes);

// Until what this thread's current stream has been given is done.
void wait_for_stream(c10::DeviceIndex device);

// The cores that host code runs on; without cores of its own a driver leaves it to the calling thread.
int num_threads();
void set_num_threads(int threads);
void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(void* ctx, int64_t begin, int64_t end), void* ctx);

}  // namespace npu
