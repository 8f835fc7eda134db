// Writing new keys and values into the paged cache.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

// Byte strides; rows of a head are copied as bytes.
struct CacheParams {
  const void* key;
  const void* value;
  void* key_cache;
  void* value_cache;
  const int64_t* slots;  // block * block_size + offset; outside of the cache: skip
  int64_t tokens, heads, block_size, num_blocks;
  int64_t key_bytes, value_bytes;  // of one head
  int64_t key_token, key_head, value_token, value_head;
  int64_t kc_block, kc_head, kc_offset, vc_block, vc_head, vc_offset;
};

NPU_KERNEL(cache, CacheParams)

// The same into 8-bit codes. Strides of keys and values in elements, of codes and scales in elements of theirs.
struct CodedRows {
  const void* rows;
  void* codes;
  float* scales;
  int64_t size, token, head;
  int64_t code_block, code_head, code_offset;
  int64_t scale_block, scale_head, scale_offset;
};
struct CacheCodesParams {
  CodedRows key, value;
  const int64_t* slots;
  int64_t tokens, heads, block_size, num_blocks;
  bool int8;          // else e4m3
  bool token_scales;  // one a token and head, to be written; else given by head
  Dtype dtype;
};

NPU_KERNEL(cache_codes, CacheCodesParams)

}  // namespace npu_ops
