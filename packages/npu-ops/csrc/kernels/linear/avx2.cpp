#include "kernels/linear/linear.inc"

namespace npu_ops {

void add_linear_avx2(KernelTable& table) {
  table.linear = linear;
  table.linear_prefers_torch = linear_prefers_torch;
}

}  // namespace npu_ops
