// Collectives for npu tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace npu {

// The backend "npuccl": the collectives of `host` (gloo) on aliases of npu tensors.
c10::intrusive_ptr<c10d::Backend> make_process_group(c10::intrusive_ptr<c10d::Backend> host);

}  // namespace npu
