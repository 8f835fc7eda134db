// Running a kernel where its tensors are: directly on the CPU, through the device's launch table on npu.
#pragma once

#include "bindings/tensors.h"

namespace npu_ops {

const Parallel& cpu_threads();

// Runs kernel(params) on the device of `on`. `name` must live for ever. On npu the call is recorded by a graph capture: params
// hold addresses and sizes only, and whatever changes from step to step is read by the kernel from device memory.
void launch_bytes(const Tensor& on, const char* name, void (*run)(const void* params, const Parallel&), const void* params, size_t bytes);

template <class Params, Kernel<Params> KernelTable::* kMember>
void launch(const Tensor& on, const char* name, const Params& params) {
  // the table is asked at each run: a tier chosen later also serves recorded graphs
  launch_bytes(on, name, [](const void* p, const Parallel& parallel) { (kernels().*kMember)(*static_cast<const Params*>(p), parallel); },
               &params, sizeof params);
}

}  // namespace npu_ops
