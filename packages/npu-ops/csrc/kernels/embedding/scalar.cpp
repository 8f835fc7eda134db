#include "kernels/embedding/embedding.inc"

namespace npu_ops {

void add_embedding_scalar(KernelTable& table) {
  table.embedding = embedding;
}

}  // namespace npu_ops
