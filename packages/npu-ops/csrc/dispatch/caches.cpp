#include "dispatch/caches.h"

#include <unistd.h>

namespace npu_ops {
namespace {

int64_t asked() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return 32 << 10;
}

}  // namespace

int64_t l1_bytes() {
  static const int64_t bytes = asked();
  return bytes;
}

}  // namespace npu_ops
