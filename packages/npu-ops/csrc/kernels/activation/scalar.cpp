#include "kernels/activation/activation.inc"

namespace npu_ops {

void add_activation_scalar(KernelTable& table) {
  table.activation = activation;
}

}  // namespace npu_ops
