#include "kernels/cache/cache.inc"

namespace npu_ops {

void add_cache_avx512(KernelTable& table) {
  table.cache = cache;
}

}  // namespace npu_ops
