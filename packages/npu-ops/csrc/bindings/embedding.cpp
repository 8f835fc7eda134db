#include "kernels/embedding/embedding.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

Tensor embedding(Tensor ids, Tensor weight) {
  NPU_CHECK(is_int64(ids) || is_int32(ids), "embedding: ids must be int64 or int32.");
  NPU_CHECK(weight.dim() == 2, "embedding: weight must be [vocabulary, width].");
  check_dense_rows(weight, "weight");
  check_same_device(weight, ids, "ids");
  const Tensor dense = torch::stable::contiguous(ids);
  std::vector<int64_t> sizes = sizes_of(ids);
  sizes.push_back(weight.size(1));
  Tensor out = empty(sizes, weight);
  const int64_t bytes = size_of(dtype_of(weight, "weight"));
  const EmbeddingParams params{dense.data_ptr(), is_int32(ids), weight.data_ptr(), out.data_ptr(), ids.numel(), weight.size(0),
                               weight.size(1) * bytes, weight.stride(0) * bytes};
  launch<embedding_tiers>(weight, "npu_ops::embedding", params);
  return out;
}

}  // namespace

NPU_OPS(m) {
  m.impl("embedding", TORCH_BOX(&embedding));
}

}  // namespace npu_ops
