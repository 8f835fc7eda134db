#include "kernels/rotary/rotary.inc"

namespace npu_ops {

void add_rotary_scalar(KernelTable& table) {
  table.rotary = rotary;
}

}  // namespace npu_ops
