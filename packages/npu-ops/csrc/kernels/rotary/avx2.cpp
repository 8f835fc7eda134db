#include "kernels/rotary/rotary.inc"

namespace npu_ops {

void add_rotary_avx2(KernelTable& table) {
  table.rotary = rotary;
}

}  // namespace npu_ops
