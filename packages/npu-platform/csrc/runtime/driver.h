// The driver of this process, chosen at its first use: the simulator, the null device or a vendor's library.
#pragma once

#include <c10/core/Device.h>
#include <c10/macros/Macros.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "include/npu_driver.h"
#include "runtime/thread_state.h"

namespace npu {

namespace detail {

struct DeviceRange {
  std::atomic<char*> base{nullptr};
  std::atomic<size_t> span{0};  // 0 until open_range()
};

extern std::atomic<const npu_driver*> driver;
extern std::array<DeviceRange, NPU_MAX_DEVICES> ranges;
extern int device_count;

const npu_driver& open_driver();  // raises RuntimeError for a driver that cannot be had, and again at each call
std::pair<char*, size_t> open_range(int device);  // asks the driver, for device_of() as well; of a device that is used, alone
[[noreturn]] void refuse_lost_launch(const char* kernel);
// For an answer that the driver gives with NPU_OK and must not: it would be a crash later.
[[noreturn]] void refuse_answer(const char* function, const std::string& what);

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

// The driver's sentence for a status that it has returned to this thread; one of ours where it has none.
std::string last_error(npu_status status);

// A new event of the driver's.
npu_event* create_event();

// Whether memory may be in use by a stream when the host is done with it: by a vendor's driver. The simulator does everything when
// it is submitted, and the null device touches no memory.
bool may_run_behind();

// Whether the driver is a vendor's library.
bool is_of_a_vendor();

// Whether kernels run. Without, an op makes its results from shapes alone.
inline bool computes() { return (driver().capabilities & NPU_DRIVER_COMPUTES) != 0; }

// The device that owns this address, or -1.
inline c10::DeviceIndex device_of(const void* address) {
  if (!is_initialized()) return -1;
  for (int i = 0; i < detail::device_count; ++i) {
    const auto& range = detail::ranges[size_t(i)];
    const size_t span = range.span.load(std::memory_order_acquire);
    if (size_t(static_cast<const char*>(address) - range.base.load(std::memory_order_relaxed)) < span) return c10::DeviceIndex(i);
  }
  return -1;
}

// Hands a kernel of host code to the driver, for the thread's current stream. The driver runs it before this returns, or,
// where it does not compute, never. Raises what the kernel raises.
template <class Kernel>
void submit(c10::DeviceIndex device, const char* name, Kernel& kernel) {
  struct Call {
    Kernel* kernel;
    bool has_run;
    std::exception_ptr error;
  } call{&kernel, false, nullptr};
  auto run = [](void* closure) noexcept {
    auto& call = *static_cast<Call*>(closure);
    call.has_run = true;
    try {
      (*call.kernel)();
    } catch (...) {
      call.error = std::current_exception();
    }
  };
  const npu_status status = driver().launch(device, thread_state.stream[size_t(device)], name, run, &call);
  if (C10_UNLIKELY(call.error != nullptr)) std::rethrow_exception(std::move(call.error));
  if (C10_UNLIKELY(status != NPU_OK)) check(status);
  if (C10_UNLIKELY(!call.has_run) && computes()) detail::refuse_lost_launch(name);
}

// Copies bytes on the thread's current stream, memory of the host and of devices alike. Both may be the host's where a tensor
// of the device `of_view` lies there.
void submit_copy(void* target, const void* source, size_t bytes, c10::DeviceIndex of_view = -1);

// The current stream of a device waits for what that of another one has been given.
void wait_between_devices(c10::DeviceIndex waiting, c10::DeviceIndex before);

// Until what this thread's current stream has been given is done.
void wait_for_stream(c10::DeviceIndex device);

// The cores that host code runs on; without cores of its own a driver leaves it to the calling thread.
int num_threads();
void set_num_threads(int threads);
// Raises the first exception that leaves a body, when all bodies have ended.
void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(void* ctx, int64_t begin, int64_t end), void* ctx);

}  // namespace npu
