// The allocators PyTorch calls: npu tensors, and the CPU allocator that turns to device memory inside a kernel.
#pragma once

#include <c10/core/Allocator.h>

#include "runtime/thread_state.h"

namespace npu {

c10::Allocator* device_allocator();

// The CPU allocator of the process. Outside kernels it is the one that was there before; inside an npu kernel, on the
// kernel's thread, it allocates from the device, so that results need no copy and temporaries count.
c10::Allocator* cpu_allocator();
void install_cpu_allocator();

// While it lives, the allocations of this thread are those of `log`, in order: how a replayed op writes to the addresses
// that it had at capture. What the log does not hold is allocated as usual.
class LendScope {
 public:
  explicit LendScope(const AllocationLog& log);
  ~LendScope();
  LendScope(const LendScope&) = delete;
  LendScope& operator=(const LendScope&) = delete;

 private:
  const AllocationLog* previous_log_;
  std::vector<Lent>* previous_lent_;
  std::vector<Lent> lent_;
};

}  // namespace npu
