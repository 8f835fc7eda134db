#include "kernels/attention/attention.inc"

namespace npu_ops {

void add_attention_scalar(KernelTable& table) {
  table.attention = attention;
}

}  // namespace npu_ops
