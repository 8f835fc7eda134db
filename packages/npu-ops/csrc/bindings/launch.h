// Running a kernel where its tensors are: directly on the CPU, through the device's launch table on npu.
#pragma once

#include "bindings/tensors.h"

namespace npu_ops {

const Parallel& cpu_threads();

// What this thread records until it says otherwise goes by batches of so many rows, of which *tokens, an int32 on the device that each run
// reads, are tokens. Null: nothing is known of padding.
void set_padding(const int32_t* tokens, int64_t rows);

// Runs kernel(params) on the device of `on`. `name` must live for ever. On npu the call is recorded by a graph capture: params
// hold addresses and sizes only, and whatever changes from step to step is read by the kernel from device memory.
using Run = void(const void* params, const Padding&, const Parallel&);
void launch_bytes(const Tensor& on, const char* name, Run* run, const void* params, size_t bytes);

// Runs the kernel of the chosen tier: launch<linear_tiers>(x, "npu_ops::linear", params).
template <const auto& kTiers, class Params>
void launch(const Tensor& on, const char* name, const Params& params) {
  // the tier is asked at each run: one chosen later also serves recorded graphs
  const auto run = [](const void* p, const Padding& padding, const Parallel& parallel) {
    Params call = *static_cast<const Params*>(p);
    leave_out(call, padding);
    kTiers.chosen(multiplies(call))(call, parallel);
  };
  launch_bytes(on, name, run, &params, sizeof params);
}

}  // namespace npu_ops
