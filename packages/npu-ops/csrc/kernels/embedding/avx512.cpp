#include "kernels/embedding/embedding.inc"

namespace npu_ops {

void add_embedding_avx512(KernelTable& table) {
  table.embedding = embedding;
}

}  // namespace npu_ops
