// What the processor and the operating system let this process use.
#pragma once

#include "dispatch/kernel_table.h"

namespace npu_ops {

// Asks CPUID, and the kernel for permission to use AMX's tile registers (once a process; threads inherit it).
Tier detect_tier();

}  // namespace npu_ops
