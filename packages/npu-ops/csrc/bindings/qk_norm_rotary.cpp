#include "kernels/qk_norm_rotary/qk_norm_rotary.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

constexpr const char* kName = "qk_norm_rotary_and_cache";

void check_heads(const Tensor& t, int64_t tokens, int64_t head_size, const char* name) {
  NPU_CHECK(t.dim() == 3 && t.size(0) == tokens && t.size(2) == head_size, kName, ": ", name, " must be [", tokens, ", heads, ", head_size, "].");
  check_dense_rows(t, name);
}

void check_weight(const std::optional<Tensor>& weight, const Tensor& query, int64_t head_size) {
  if (!weight) return;
  NPU_CHECK(weight->dim() == 1 && weight->size(0) == head_size && weight->is_contiguous(), kName, ": weights must be contiguous [", head_size, "].");
  NPU_CHECK(weight->scalar_type() == query.scalar_type() || weight->scalar_type() == ScalarType::Float, kName,
            ": weights must be float32 or of the query's dtype.");
  check_same_device(query, *weight, "weight");
}

CacheParams cache_params(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots) {
  const int64_t heads = key.size(1), b = size_of(dtype_of(key, "key"));
  for (const Tensor* cache : {&key_cache, &value_cache}) {
    NPU_CHECK(cache->dim() == 4 && cache->size(1) == heads, kName, ": caches must be [blocks, ", heads, ", tokens of a block, size].");
    check_same_dtype(key, *cache, "each cache");
    check_dense_rows(*cache, "each cache");
    check_written(*cache, "each cache");
  }
  NPU_CHECK(key_cache.size(3) == key.size(2) && value_cache.size(3) == value.size(2), kName, ": sizes of heads and caches must agree.");
  NPU_CHECK(value_cache.size(0) == key_cache.size(0) && value_cache.size(2) == key_cache.size(2), kName, ": both caches must have ",
            key_cache.size(0), " blocks of ", key_cache.size(2), " tokens.");
  NPU_CHECK(key_cache.size(2) > 0, kName, ": a block of the caches must have at least one token.");
  return {key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), static_cast<const int64_t*>(slots.data_ptr()), slots.numel(),
          heads, key_cache.size(2), key_cache.size(0), key.size(2) * b, value.size(2) * b, key.stride(0) * b, key.stride(1) * b, value.stride(0) * b,
          value.stride(1) * b, key_cache.stride(0) * b, key_cache.stride(1) * b, key_cache.stride(2) * b, value_cache.stride(0) * b,
          value_cache.stride(1) * b, value_cache.stride(2) * b};
}

void qk_norm_rotary_and_cache(Tensor positions, Tensor query, Tensor key, Tensor value, std::optional<Tensor> query_weight,
                              std::optional<Tensor> key_weight, double eps, Tensor table, bool neox, Tensor key_cache, Tensor value_cache,
                              Tensor slots) {
  const int64_t count = positions.numel(), size = query.size(query.dim() - 1);
  NPU_CHECK(is_int64(positions) && positions.is_contiguous() && is_int64(slots) && slots.is_contiguous() && slots.numel() <= count, kName,
            ": positions and slot_mapping must be contiguous int64, no more slots than positions.");
  check_heads(query, count, size, "query");
  check_heads(key, count, size, "key");
  check_heads(value, count, value.size(value.dim() - 1), "value");
  check_written(query, "query");
  check_written(key, "key");
  NPU_CHECK(value.size(1) == key.size(1), kName, ": key and value must have the same heads.");
  NPU_CHECK(table.dim() == 2 && table.size(1) % 2 == 0 && table.size(1) <= size, kName, ": cos_sin_cache must be [positions, rotary_dim <= ", size, "].");
  NPU_CHECK(table.scalar_type() == query.scalar_type() || table.scalar_type() == ScalarType::Float, kName,
            ": cos_sin_cache must be float32 or of the query's dtype.");
  check_dense_rows(table, "cos_sin_cache");
  for (const Tensor* t : {&key, &value}) check_same_dtype(query, *t, "key and value");
  check_one_device(query, {&key, &value, &table, &positions, &slots, &key_cache, &value_cache});
  check_weight(query_weight, query, size);
  check_weight(key_weight, query, size);
  if (query_weight && key_weight) check_same_dtype(*query_weight, *key_weight, "key_weight");
  const std::optional<Tensor>& weight = query_weight ? query_weight : key_weight;
  QkNormRotaryParams params{};
  params.rotary = {static_cast<const int64_t*>(positions.data_ptr()), 0, query.data_ptr(), key.data_ptr(), count, query.size(1), key.size(1), size,
                   table.size(1), query.stride(0), key.stride(0), query.stride(1), key.stride(1), table.data_ptr(), table.stride(0), table.size(0),
                   dtype_of(query, "query"), dtype_of(table, "cos_sin_cache"), neox, {0, 0, 0}, false};
  params.cache = cache_params(key, value, key_cache, value_cache, slots);
  params.query_weight = query_weight ? query_weight->data_ptr() : nullptr;
  params.key_weight = key_weight ? key_weight->data_ptr() : nullptr;
  params.weight_dtype = weight ? dtype_of(*weight, "weight") : Dtype::fp32;
  params.eps = static_cast<float>(eps);
  launch<qk_norm_rotary_tiers>(query, "npu_ops::qk_norm_rotary_and_cache", params);
}

}  // namespace

NPU_OPS(m) {
  m.impl("qk_norm_rotary_and_cache", TORCH_BOX(&qk_norm_rotary_and_cache));
}

}  // namespace npu_ops
