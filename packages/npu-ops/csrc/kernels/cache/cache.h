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
  const int64_t* slots;  // block * block_size + offset; negative: skip
  int64_t tokens, heads, block_size, num_blocks;
  int64_t key_bytes, value_bytes;  // of one head
  int64_t key_token, key_head, value_token, value_head;
  int64_t kc_block, kc_head, kc_offset, vc_block, vc_head, vc_offset;
};

NPU_KERNEL(cache, CacheParams)

}  // namespace npu_ops
