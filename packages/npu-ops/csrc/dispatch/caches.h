// What the machine says of its caches, for kernels whose best way depends on it.
#pragma once

#include <cstdint>

namespace npu_ops {

// Bytes of a core's first cache for data; 32 KiB where the machine does not tell.
int64_t l1_bytes();
constexpr int64_t kLargeL1 = 48 << 10;

}  // namespace npu_ops
