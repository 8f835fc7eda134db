#include "kernels/rotary/rotary.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

struct Heads {
  void* data;
  int64_t heads, token_stride, head_stride;
};

// [tokens, heads * head_size] or [tokens, heads, head_size], written in place
Heads heads_of(const Tensor& t, int64_t tokens, int64_t head_size, const char* name) {
  check_dense_rows(t, name);
  check_written(t, name);
  if (t.dim() == 3) {
    NPU_CHECK(t.size(0) == tokens && t.size(2) == head_size, "rotary_embedding: ", name, " must be [", tokens, ", heads, ", head_size, "].");
    return {t.data_ptr(), t.size(1), t.stride(0), t.stride(1)};
  }
  NPU_CHECK(t.dim() == 2 && t.size(0) == tokens && t.size(1) % head_size == 0, "rotary_embedding: ", name, " must be [", tokens,
            ", heads * ", head_size, "].");
  return {t.data_ptr(), t.size(1) / head_size, t.stride(0), head_size};
}

void run(const Tensor& positions, const Tensor& query, const std::optional<Tensor>& key, int64_t head_size, const Tensor& table, bool neox,
         const std::vector<int64_t>& sections, bool interleaved) {
  const bool three = !sections.empty();
  NPU_CHECK(is_int64(positions), "rotary_embedding: positions must be int64.");
  NPU_CHECK(head_size > 0, "rotary_embedding: head_size must be positive, got ", head_size, ".");
  NPU_CHECK(three ? positions.dim() == 2 && positions.size(0) == 3 && sections.size() == 3 : true,
            "rotary_embedding: sections are three, and positions then [3, tokens].");
  check_dense_rows(positions, "positions");
  NPU_CHECK(three || positions.is_contiguous(), "rotary_embedding: positions must be contiguous.");
  NPU_CHECK(table.dim() == 2 && table.size(1) % 2 == 0 && table.size(1) <= head_size, "rotary_embedding: cos_sin_cache must be [positions, rotary_dim <= ",
            head_size, "].");
  check_dense_rows(table, "cos_sin_cache");
  check_same_device(query, table, "cos_sin_cache");
  check_same_device(query, positions, "positions");
  const int64_t tokens = three ? positions.size(1) : positions.numel();
  const Heads q = heads_of(query, tokens, head_size, "query");
  const Heads k = key ? heads_of(*key, tokens, head_size, "key") : Heads{nullptr, 0, 0, 0};
  if (key) check_same_dtype(query, *key, "key");
  check_same_device(query, key, "key");
  RotaryParams params{static_cast<const int64_t*>(positions.data_ptr()), three ? positions.stride(0) : 0, q.data, k.data, tokens, q.heads,
                      k.heads, head_size, table.size(1), q.token_stride, k.token_stride, q.head_stride, k.head_stride, table.data_ptr(),
                      table.stride(0), table.size(0), dtype_of(query, "query"), dtype_of(table, "cos_sin_cache"), neox, {0, 0, 0}, interleaved};
  for (size_t i = 0; i < sections.size(); ++i) params.sections[i] = static_cast<int32_t>(sections[i]);
  launch<rotary_tiers>(query, "npu_ops::rotary_embedding", params);
}

void rotary_embedding(Tensor positions, Tensor query, std::optional<Tensor> key, int64_t head_size, Tensor cos_sin_cache, bool is_neox) {
  run(positions, query, key, head_size, cos_sin_cache, is_neox, {}, false);
}

void multimodal_rotary_embedding(Tensor positions, Tensor query, std::optional<Tensor> key, int64_t head_size, Tensor cos_sin_cache,
                                 bool is_neox, std::vector<int64_t> sections, bool interleaved) {
  const int64_t half = cos_sin_cache.size(cos_sin_cache.dim() - 1) / 2;
  int64_t left = half;
  for (const int64_t section : sections) {
    NPU_CHECK(section >= 0 && section <= left, "multimodal_rotary_embedding: sections must share out the ", half, " channels, got one of ", section,
              " where ", left, " are left.");
    left -= section;
  }
  NPU_CHECK(left == 0, "multimodal_rotary_embedding: sections must share out the ", half, " channels, but leave ", left, ".");
  run(positions, query, key, head_size, cos_sin_cache, is_neox, sections, interleaved);
}

}  // namespace

NPU_OPS(m) {
  m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
  m.impl("multimodal_rotary_embedding", TORCH_BOX(&multimodal_rotary_embedding));
}

}  // namespace npu_ops
