#include "kernels/sampling/sampling.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

Tensor argmax(Tensor logits) {
  NPU_CHECK(logits.dim() == 2 && logits.size(1) > 0, "argmax: logits must be [rows, vocabulary > 0].");
  check_dense_rows(logits, "logits");
  Tensor out = torch::stable::new_empty(logits, std::vector<int64_t>{logits.size(0)}, ScalarType::Long);
  const ArgmaxParams params{logits.data_ptr(), static_cast<int64_t*>(out.data_ptr()), logits.size(0), logits.size(1), logits.stride(0),
                            dtype_of(logits, "logits")};
  launch<argmax_tiers>(logits, "npu_ops::argmax", params);
  return out;
}

void top_k_top_p(Tensor logits, std::optional<Tensor> k, std::optional<Tensor> p) {
  NPU_CHECK(logits.dim() == 2 && logits.scalar_type() == ScalarType::Float, "top_k_top_p: logits must be float32 [rows, vocabulary].");
  check_dense_rows(logits, "logits");
  const int64_t rows = logits.size(0);
  if (k) NPU_CHECK((is_int64(*k) || is_int32(*k)) && k->numel() == rows && k->is_contiguous(), "top_k_top_p: k must be int32 or int64 [", rows, "].");
  if (p) NPU_CHECK(p->scalar_type() == ScalarType::Float && p->numel() == rows && p->is_contiguous(), "top_k_top_p: p must be float32 [", rows, "].");
  if (!k && !p) return;
  const TopKTopPParams params{static_cast<float*>(logits.data_ptr()), k ? k->data_ptr() : nullptr, k && is_int32(*k),
                              p ? static_cast<const float*>(p->data_ptr()) : nullptr, rows, logits.size(1), logits.stride(0)};
  launch<top_k_top_p_tiers>(logits, "npu_ops::top_k_top_p", params);
}

}  // namespace

NPU_OPS(m) {
  m.impl("argmax", TORCH_BOX(&argmax));
  m.impl("top_k_top_p", TORCH_BOX(&top_k_top_p));
}

}  // namespace npu_ops
