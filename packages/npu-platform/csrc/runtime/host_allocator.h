// Pinned host memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include "runtime/capture_streams.h"

namespace npu {

at::HostAllocator* host_allocator();
bool is_pinned(const void* address);
// Pinned memory at this address is not used again, when it is freed, before what the stream has been given is done.
void note_pinned_use(const void* address, StreamName stream);

}  // namespace npu
