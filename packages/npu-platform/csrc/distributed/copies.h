// Copies into the memory that ranks share. On AMD's processors before Zen 5 they go past the caches: a line that another core has just
// written, or still holds, is up to ten times slower to come by there than one of the memory, where the two have no cache in common, and a
// virtual machine's may have one this minute and none the next. Elsewhere the way through the caches is the faster one.
#pragma once

#include <cstddef>

namespace npu {

void copy_bytes(void* to, const void* from, size_t bytes);

// Into a slot that other ranks read next.
void copy_into_slot(void* to, const void* from, size_t bytes);

// The same, and to a second place as any copy, reading once.
void copy_into_slot_and_to(void* to, void* also_to, const void* from, size_t bytes);

// Written to memory, not to this core's caches, but for a few bytes.
void copy_past_caches(void* to, const void* from, size_t bytes);
void copy_past_caches_and_to(void* to, void* also_to, const void* from, size_t bytes);

}  // namespace npu
