// How a token is written into the cache, compiled once a tier.
#pragma once

#include "kernels/cache/cache.h"
#include "vector/vec.h"

namespace npu_ops::NPU_TIER {
namespace {

// A replayed kernel cannot raise: a slot that is none of the cache is skipped, as a negative one is.
template <class Params>
NPU_INLINE bool is_slot(const Params& p, int64_t slot) { return slot >= 0 && slot < p.num_blocks * p.block_size; }

inline void write_token(const CacheParams& p, int64_t t) {
  const int64_t slot = p.slots[t];
  if (!is_slot(p, slot)) return;
  const int64_t block = slot / p.block_size, offset = slot % p.block_size;
  const char* k = static_cast<const char*>(p.key) + t * p.key_token;
  const char* v = static_cast<const char*>(p.value) + t * p.value_token;
  char* kc = static_cast<char*>(p.key_cache) + block * p.kc_block + offset * p.kc_offset;
  char* vc = static_cast<char*>(p.value_cache) + block * p.vc_block + offset * p.vc_offset;
  for (int64_t h = 0; h < p.heads; ++h) {
    memcpy(kc + h * p.kc_head, k + h * p.key_head, p.key_bytes);
    memcpy(vc + h * p.vc_head, v + h * p.value_head, p.value_bytes);
  }
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
