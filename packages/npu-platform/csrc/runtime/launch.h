// The one door to the device: whatever computes on it goes through launch().
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "faults/watch.h"
#include "runtime/driver.h"
#include "runtime/fences.h"
#include "runtime/graph.h"
#include "runtime/profiler.h"
#include "runtime/thread_state.h"

namespace npu {

// Inside a kernel of `device`: its memory is the allocator's, and the launch is counted. Kernels, fallbacks, copies and
// replayed nodes all construct one. Raises torch.AcceleratorError for a fault on demand.
class KernelScope {
 public:
  KernelScope(c10::DeviceIndex device, const char* name);
  ~KernelScope() noexcept(false) {  // raises RuntimeError when the kernel wrote outside its tensors (NPU_DEBUG=memory)
    if (C10_UNLIKELY(began_ != 0)) profiler::record_kernel(thread_state.device, name_, began_);
    --thread_state.kernel_depth;
    thread_state.device = previous_;
    if (C10_UNLIKELY(watched_ != nullptr)) leave();
  }
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  struct Watched;
  struct Delete {
    void operator()(Watched* watched) const;
  };
  void leave();

  c10::DeviceIndex previous_;
  const char* name_;
  int64_t began_;  // for the profiler: 0 when none records, and in kernels that another one runs
  std::unique_ptr<Watched, Delete> watched_;  // where faults are armed or memory is checked
};

// Where the runtime itself reads or writes device memory outside a kernel.
class MemoryScope {
 public:
  explicit MemoryScope(const char* name) {
    if (is_watched(kWatchMemory)) open_.emplace(name);
  }

 private:
  std::optional<OpenMemory> open_;
};

struct LaunchCounts {
  int64_t kernels = 0;    // launches of any kind, replayed ones included
  int64_t fallbacks = 0;  // of them, ops that ran their CPU kernel on aliases
};
LaunchCounts launch_counts();
void count_fallback();

// Whether this thread's launches of that kernel leave its outputs as they are (torch.npu.skip_kernels).
inline bool is_skipped(const char* name) {
  return C10_UNLIKELY(thread_state.skipped != nullptr) && thread_state.skipped->contains(std::string_view(name));
}

// Runs a kernel now, and makes it a node of the graph that this thread captures. What the kernel refers to must be
// plain memory: addresses and sizes, which outlive the call.
template <class Kernel>
void launch(c10::DeviceIndex device, const char* name, Kernel kernel) {
  {
    KernelScope inside(device, name);
    if (!is_skipped(name)) submit(device, name, kernel);
  }
  if (C10_UNLIKELY(is_capturing())) record_node(std::make_unique<KernelNode<Kernel>>(device, name, std::move(kernel)));
}

}  // namespace npu
