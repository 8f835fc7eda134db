#include "kernels/attention/attention.inc"

namespace npu_ops {

void add_attention_avx2(KernelTable& table) {
  table.attention = attention;
}

}  // namespace npu_ops
