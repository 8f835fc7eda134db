// Storages of the device that change their size.
#pragma once

#include <c10/core/StorageImpl.h>

namespace npu {

// Gives a storage new memory and copies what fits, by a launch of that name, which a graph under capture repeats. Raises
// RuntimeError for a storage that cannot be resized, and during a capture when the contents come from outside the graph.
void resize_storage(c10::StorageImpl& storage, size_t bytes, const char* name);

}  // namespace npu
