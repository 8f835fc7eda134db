// The kernel of every op that has none of its own.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "aten/op_info.h"

namespace npu {

// Raises NotImplementedError for an op without a CPU kernel, or for any op under NPU_FALLBACK=error.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Counts a call whose CPU kernel is to run on aliases, and reports it as NPU_FALLBACK says.
void enter_fallback(const OpInfo& info);

// PyTorch prefers a composite kernel to a fallback even where the CPU has a kernel of its own, which computes other last
// digits (layer_norm) in fewer launches, or spares an allocation and an alias (add, by its out= variant): for these ops
// the fallback becomes the kernel. Call it once.
void prefer_fallback_to_composites();

}  // namespace npu
