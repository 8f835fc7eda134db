// Copies into the memory that ranks share, past the caches: a line that another core has just written, or still holds, is
// slower to come by than one of the memory, on processors whose cores have no common cache ten times.
#pragma once

#include <cstddef>

namespace npu {

void copy_bytes(void* to, const void* from, size_t bytes);

// Written to memory, not to this core's caches, but for a few bytes.
void copy_past_caches(void* to, const void* from, size_t bytes);

// The same, and to a second place as any copy, reading once.
void copy_past_caches_and_to(void* to, void* also_to, const void* from, size_t bytes);

}  // namespace npu
