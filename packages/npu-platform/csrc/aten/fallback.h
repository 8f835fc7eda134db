// The kernel of every op that has none of its own.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace npu {

// Raises NotImplementedError for an op without a CPU kernel, or for any op under NPU_FALLBACK=error.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace npu
