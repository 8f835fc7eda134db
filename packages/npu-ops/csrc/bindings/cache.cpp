#include "kernels/cache/cache.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

void reshape_and_cache(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping) {
  NPU_CHECK(key.dim() == 3 && value.dim() == 3 && key_cache.dim() == 4 && value_cache.dim() == 4,
            "reshape_and_cache: key and value must be [tokens, heads, size], the caches [blocks, heads, tokens of a block, size].");
  NPU_CHECK(is_int64(slot_mapping) && slot_mapping.is_contiguous(), "reshape_and_cache: slot_mapping must be contiguous int64.");
  const int64_t tokens = slot_mapping.numel(), heads = key.size(1);
  NPU_CHECK(key.size(0) >= tokens && value.size(0) >= tokens, "reshape_and_cache: ", tokens, " slots, but only ", key.size(0), " keys.");
  NPU_CHECK(value.size(1) == heads && key_cache.size(1) == heads && value_cache.size(1) == heads && key_cache.size(3) == key.size(2) &&
                value_cache.size(3) == value.size(2),
            "reshape_and_cache: heads and sizes of keys, values and caches must agree.");
  check_same_dtype(key, value, "value");
  check_same_dtype(key, key_cache, "key_cache");
  check_same_dtype(key, value_cache, "value_cache");
  for (const Tensor* t : {&key, &value, &key_cache, &value_cache}) check_dense_rows(*t, "every argument");
  const int64_t b = size_of(dtype_of(key, "key"));
  const CacheParams params{key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
                           static_cast<const int64_t*>(slot_mapping.data_ptr()), tokens, heads, key_cache.size(2), key_cache.size(0),
                           key.size(2) * b, value.size(2) * b, key.stride(0) * b, key.stride(1) * b, value.stride(0) * b, value.stride(1) * b,
                           key_cache.stride(0) * b, key_cache.stride(1) * b, key_cache.stride(2) * b, value_cache.stride(0) * b,
                           value_cache.stride(1) * b, value_cache.stride(2) * b};
  launch<cache_tiers>(key_cache, "npu_ops::reshape_and_cache", params);
}

}  // namespace

NPU_OPS(m) {
  m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
}

}  // namespace npu_ops
