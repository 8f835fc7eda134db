// Pinned host memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace npu {

at::HostAllocator* host_allocator();
bool is_pinned(const void* address);

}  // namespace npu
