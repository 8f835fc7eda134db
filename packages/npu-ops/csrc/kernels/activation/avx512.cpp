#include "kernels/activation/activation.inc"

namespace npu_ops {

void add_activation_avx512(KernelTable& table) {
  table.activation = activation;
}

}  // namespace npu_ops
