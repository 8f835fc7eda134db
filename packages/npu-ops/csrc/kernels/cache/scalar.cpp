#include "kernels/cache/cache.inc"

namespace npu_ops {

void add_cache_scalar(KernelTable& table) {
  table.cache = cache;
}

}  // namespace npu_ops
