// Attention over a paged cache or over plain keys: decode, chunked prefill and mixed batches in one call.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

enum class Code : int { none, e4m3, int8 };

// Strides in elements. All per-step values (lengths, tables) are read when the kernel runs.
struct AttentionParams {
  void* out;
  const void* query;
  const void* key;
  const void* value;
  const int32_t* block_table;  // null: keys and values are plain rows [token, head], located by query_start_loc
  int64_t block_table_stride;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;  // null: each request has as many keys as queries
  int64_t tokens;           // rows of query: no request reaches beyond
  int64_t requests, query_heads, kv_heads, head_size, value_size, block_size, num_blocks;
  int64_t most_keys;  // that a row of block_table has room for: no sequence is longer
  int64_t out_token, out_head, query_token, query_head;
  int64_t key_block, key_head, key_token, value_block, value_head, value_token;
  float scale, soft_cap;
  bool causal;
  int64_t window_left, window_right;  // negative: unlimited
  const float* alibi_slopes;          // [query_heads] or null
  const void* sinks;                  // [query_heads] or null
  float* lse;  // [tokens, query_heads] or null: log of the sum that a row is divided by, a sink's part of it included
  Dtype dtype, sinks_dtype;
  // Codes of keys and values other than dtype, each times its scale: by KV head and, if token_scales, by block and token.
  Code code;
  const float* key_scale;
  const float* value_scale;
  bool token_scales;
  int64_t key_scale_block, key_scale_head, key_scale_token, value_scale_block, value_scale_head, value_scale_token;
};

// So many queries meet each key, on average: with fewer, attention waits for the cache.
__attribute__((always_inline)) constexpr bool multiplies(const AttentionParams& p) {
  return p.dtype == Dtype::bf16 && p.tokens * p.query_heads >= 8 * p.requests * p.kv_heads;
}

NPU_KERNEL(attention, AttentionParams)

}  // namespace npu_ops
