#include "kernels/cache/cache.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

void check_shapes(const char* op, const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                  const Tensor& slot_mapping) {
  NPU_CHECK(key.dim() == 3 && value.dim() == 3 && key_cache.dim() == 4 && value_cache.dim() == 4, op,
            ": key and value must be [tokens, heads, size], the caches [blocks, heads, tokens of a block, size].");
  NPU_CHECK(is_int64(slot_mapping) && slot_mapping.is_contiguous(), op, ": slot_mapping must be contiguous int64.");
  const int64_t tokens = slot_mapping.numel(), heads = key.size(1);
  NPU_CHECK(key.size(0) >= tokens && value.size(0) >= tokens, op, ": ", tokens, " slots, but only ", key.size(0), " keys.");
  NPU_CHECK(value.size(1) == heads && key_cache.size(1) == heads && value_cache.size(1) == heads && key_cache.size(3) == key.size(2) &&
                value_cache.size(3) == value.size(2),
            op, ": heads and sizes of keys, values and caches must agree.");
  const int64_t blocks = key_cache.size(0), block_size = key_cache.size(2);
  NPU_CHECK(value_cache.size(0) == blocks && value_cache.size(2) == block_size, op, ": both caches must have ", blocks, " blocks of ",
            block_size, " tokens.");
  NPU_CHECK(block_size > 0, op, ": a block of the caches must have at least one token.");
  check_same_dtype(key, value, "value");
  for (const Tensor* t : {&key, &value, &key_cache, &value_cache}) check_dense_rows(*t, "every argument");
  check_one_device(key, {&value, &key_cache, &value_cache, &slot_mapping});
  for (const Tensor* t : {&key_cache, &value_cache}) check_written(*t, "each cache");
}

void reshape_and_cache(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping) {
  check_shapes("reshape_and_cache", key, value, key_cache, value_cache, slot_mapping);
  check_same_dtype(key, key_cache, "key_cache");
  check_same_dtype(key, value_cache, "value_cache");
  const int64_t tokens = slot_mapping.numel(), heads = key.size(1);
  const int64_t b = size_of(dtype_of(key, "key"));
  const CacheParams params{key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
                           static_cast<const int64_t*>(slot_mapping.data_ptr()), tokens, heads, key_cache.size(2), key_cache.size(0),
                           key.size(2) * b, value.size(2) * b, key.stride(0) * b, key.stride(1) * b, value.stride(0) * b, value.stride(1) * b,
                           key_cache.stride(0) * b, key_cache.stride(1) * b, key_cache.stride(2) * b, value_cache.stride(0) * b,
                           value_cache.stride(1) * b, value_cache.stride(2) * b};
  launch<cache_tiers>(key_cache, "npu_ops::reshape_and_cache", params);
}

CodedRows coded_rows(const Tensor& rows, const Tensor& codes, const Tensor& scales, const char* name) {
  const int64_t heads = rows.size(1);
  NPU_CHECK(scales.scalar_type() == ScalarType::Float, "reshape_and_cache_quantized: the scale of ", name, " must be float32.");
  check_same_device(rows, scales, "each scale");
  CodedRows r{rows.data_ptr(), codes.data_ptr(), static_cast<float*>(scales.data_ptr()), rows.size(2), rows.stride(0), rows.stride(1),
              codes.stride(0), codes.stride(1), codes.stride(2), 0, 0, 0};
  if (scales.dim() == 3) {
    NPU_CHECK(scales.size(0) == codes.size(0) && scales.size(1) == heads && scales.size(2) == codes.size(2),
              "reshape_and_cache_quantized: the scales of ", name, " must be [blocks, heads, tokens of a block].");
    r.scale_block = scales.stride(0), r.scale_head = scales.stride(1), r.scale_offset = scales.stride(2);
    return r;
  }
  NPU_CHECK(scales.dim() <= 1 && (scales.numel() == 1 || scales.numel() == heads) && scales.is_contiguous(),
            "reshape_and_cache_quantized: the scale of ", name, " must be one, [heads] or [blocks, heads, tokens of a block].");
  r.scale_head = scales.numel() == 1 ? 0 : 1;
  return r;
}

void reshape_and_cache_quantized(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor key_scale, Tensor value_scale,
                                 Tensor slot_mapping) {
  check_shapes("reshape_and_cache_quantized", key, value, key_cache, value_cache, slot_mapping);
  check_same_dtype(key_cache, value_cache, "value_cache");
  NPU_CHECK((key_scale.dim() == 3) == (value_scale.dim() == 3), "reshape_and_cache_quantized: either both scales are by token, or none is.");
  const ScalarType code = key_cache.scalar_type();
  NPU_CHECK(code == ScalarType::Float8_e4m3fn || code == ScalarType::Char, "reshape_and_cache_quantized: caches must be float8_e4m3fn or int8.");
  const CacheCodesParams params{coded_rows(key, key_cache, key_scale, "key"), coded_rows(value, value_cache, value_scale, "value"),
                                static_cast<const int64_t*>(slot_mapping.data_ptr()), slot_mapping.numel(), key.size(1), key_cache.size(2),
                                key_cache.size(0), code == ScalarType::Char, key_scale.dim() == 3, dtype_of(key, "key")};
  launch<cache_codes_tiers>(key_cache, "npu_ops::reshape_and_cache_quantized", params);
}

}  // namespace

NPU_OPS(m) {
  m.impl("reshape_and_cache_quantized", TORCH_BOX(&reshape_and_cache_quantized));
  m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
}

}  // namespace npu_ops
