#include "kernels/sampling/sampling.inc"

namespace npu_ops {

void add_sampling_scalar(KernelTable& table) {
  table.argmax = argmax;
  table.top_k_top_p = top_k_top_p;
}

}  // namespace npu_ops
