#include "kernels/layernorm/layernorm.inc"

namespace npu_ops {

void add_layernorm_avx2(KernelTable& table) {
  table.norm = norm;
}

}  // namespace npu_ops
