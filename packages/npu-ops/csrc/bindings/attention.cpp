#include "kernels/attention/attention.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

struct Options {
  double scale;
  bool causal;
  int64_t window_left, window_right;
  double soft_cap;
  const std::optional<Tensor>&alibi_slopes, &sinks, &lse;
};

// [tokens, heads, size] or [tokens, heads * size], the head's size known
struct Heads {
  void* data;
  int64_t token, head;
};
Heads heads_of(const Tensor& t, int64_t tokens, int64_t heads, int64_t size, const char* name) {
  check_dense_rows(t, name);
  NPU_CHECK(t.size(0) >= tokens, "attention: ", name, " must have the query's ", tokens, " tokens, got ", t.size(0), ".");
  if (t.dim() == 3) {
    NPU_CHECK(t.size(1) == heads && t.size(2) == size, "attention: ", name, " must be [tokens, ", heads, ", ", size, "].");
    return {t.data_ptr(), t.stride(0), t.stride(1)};
  }
  NPU_CHECK(t.dim() == 2 && t.size(1) == heads * size, "attention: ", name, " must be [tokens, ", heads, " * ", size, "].");
  return {t.data_ptr(), t.stride(0), size};
}

void check_index(const Tensor& t, const char* name) {
  NPU_CHECK(is_int32(t), "attention: ", name, " must be int32.");
  check_dense_rows(t, name);
}

// What both kinds of attention share; keys and values are set by the caller.
AttentionParams common(const Tensor& output, const Tensor& query, const Tensor& start, int64_t head_size, int64_t value_size,
                       int64_t kv_heads, const Options& o) {
  NPU_CHECK(kv_heads > 0 && head_size > 0, "attention: there must be KV heads, and elements in a head; got ", kv_heads, " of ", head_size, ".");
  const int64_t tokens = query.size(0), heads = query.dim() == 3 ? query.size(1) : query.size(1) / head_size;
  NPU_CHECK(heads % kv_heads == 0, "attention: ", heads, " query heads do not divide among ", kv_heads, " KV heads.");
  check_index(start, "query_start_loc");
  check_same_dtype(query, output, "output");
  check_one_device(output, {&query, &start});
  check_written(output, "output");
  const Heads q = heads_of(query, tokens, heads, head_size, "query"), out = heads_of(output, tokens, heads, value_size, "output");
  AttentionParams p{};
  p.out = out.data, p.out_token = out.token, p.out_head = out.head;
  p.query = q.data, p.query_token = q.token, p.query_head = q.head;
  p.query_start_loc = static_cast<const int32_t*>(start.data_ptr());
  p.tokens = tokens, p.requests = start.numel() - 1;
  p.query_heads = heads, p.kv_heads = kv_heads, p.head_size = head_size, p.value_size = value_size;
  p.scale = static_cast<float>(o.scale), p.soft_cap = static_cast<float>(o.soft_cap);
  p.causal = o.causal, p.window_left = o.window_left, p.window_right = o.window_right;
  p.dtype = dtype_of(query, "query");
  if (o.alibi_slopes) {
    NPU_CHECK(o.alibi_slopes->scalar_type() == ScalarType::Float && o.alibi_slopes->numel() == heads && o.alibi_slopes->is_contiguous(),
              "attention: alibi_slopes must be float32 [", heads, "].");
    check_same_device(output, *o.alibi_slopes, "alibi_slopes");
    p.alibi_slopes = static_cast<const float*>(o.alibi_slopes->data_ptr());
  }
  if (o.sinks) {
    NPU_CHECK(o.sinks->numel() == heads && o.sinks->is_contiguous(), "attention: sinks must be [", heads, "].");
    check_same_device(output, *o.sinks, "sinks");
    p.sinks = o.sinks->data_ptr();
    p.sinks_dtype = dtype_of(*o.sinks, "sinks");
  }
  if (o.lse) {
    NPU_CHECK(o.lse->scalar_type() == ScalarType::Float && o.lse->dim() == 2 && o.lse->size(0) == p.tokens && o.lse->size(1) == heads &&
                  o.lse->is_contiguous(),
              "attention: lse must be float32 [", p.tokens, ", ", heads, "].");
    check_same_device(output, *o.lse, "lse");
    p.lse = static_cast<float*>(o.lse->data_ptr());
  }
  return p;
}

// What the ops over a cache share; the caches' dtype is checked by the caller.
AttentionParams paged(const Tensor& output, const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                      const Tensor& query_start_loc, const Tensor& seq_lens, const Options& o) {
  NPU_CHECK(key_cache.dim() == 4 && value_cache.dim() == 4, "paged_attention: caches must be [blocks, heads, tokens of a block, size].");
  check_same_dtype(key_cache, value_cache, "value_cache");
  check_one_device(output, {&key_cache, &value_cache, &block_table, &seq_lens});
  check_dense_rows(key_cache, "key_cache");
  check_dense_rows(value_cache, "value_cache");
  const int64_t blocks = key_cache.size(0), heads = key_cache.size(1), block_size = key_cache.size(2);
  NPU_CHECK(value_cache.size(0) == blocks && value_cache.size(1) == heads && value_cache.size(2) == block_size,
            "paged_attention: both caches must be [", blocks, " blocks, ", heads, " heads, ", block_size, " tokens of a block, size].");
  NPU_CHECK(block_size > 0, "paged_attention: a block of the caches must have at least one token.");
  check_index(block_table, "block_table");
  check_index(seq_lens, "seq_lens");
  AttentionParams p = common(output, query, query_start_loc, key_cache.size(3), value_cache.size(3), heads, o);
  NPU_CHECK(block_table.dim() == 2 && block_table.size(0) >= p.requests && seq_lens.numel() >= p.requests,
            "paged_attention: block_table and seq_lens must have a row for each of ", p.requests, " requests.");
  p.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  p.block_table_stride = block_table.stride(0);
  p.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
  p.block_size = block_size, p.num_blocks = blocks;
  p.most_keys = blocks > 0 ? block_table.size(1) * block_size : 0;
  p.key = key_cache.data_ptr(), p.key_block = key_cache.stride(0), p.key_head = key_cache.stride(1), p.key_token = key_cache.stride(2);
  p.value = value_cache.data_ptr(), p.value_block = value_cache.stride(0), p.value_head = value_cache.stride(1),
  p.value_token = value_cache.stride(2);
  return p;
}

void attend(const Tensor& query, const char* name, const AttentionParams& p) {
  if (p.query_heads > 0) launch<attention_tiers>(query, name, p);
}

void paged_attention(Tensor output, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor query_start_loc,
                     Tensor seq_lens, double scale, bool causal, int64_t window_left, int64_t window_right, double soft_cap,
                     std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks, std::optional<Tensor> lse) {
  check_same_dtype(query, key_cache, "key_cache");
  const AttentionParams p = paged(output, query, key_cache, value_cache, block_table, query_start_loc, seq_lens,
                                  {scale, causal, window_left, window_right, soft_cap, alibi_slopes, sinks, lse});
  attend(query, "npu_ops::paged_attention", p);
}

void check_scale(const Tensor& scale, const Tensor& cache, const char* name) {
  check_same_device(cache, scale, name);
  NPU_CHECK(scale.scalar_type() == ScalarType::Float, "paged_attention_quantized: ", name, " must be float32.");
  if (scale.dim() == 3) {
    NPU_CHECK(scale.size(0) == cache.size(0) && scale.size(1) == cache.size(1) && scale.size(2) == cache.size(2),
              "paged_attention_quantized: ", name, " must be [blocks, heads, tokens of a block].");
    return;
  }
  NPU_CHECK(scale.dim() <= 1 && (scale.numel() == 1 || scale.numel() == cache.size(1)) && scale.is_contiguous(),
            "paged_attention_quantized: ", name, " must be one, [heads] or [blocks, heads, tokens of a block].");
}

void paged_attention_quantized(Tensor output, Tensor query, Tensor key_cache, Tensor value_cache, Tensor key_scale, Tensor value_scale,
                               Tensor block_table, Tensor query_start_loc, Tensor seq_lens, double scale, bool causal, int64_t window_left,
                               int64_t window_right, double soft_cap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                               std::optional<Tensor> lse) {
  AttentionParams p = paged(output, query, key_cache, value_cache, block_table, query_start_loc, seq_lens,
                            {scale, causal, window_left, window_right, soft_cap, alibi_slopes, sinks, lse});
  const ScalarType code = key_cache.scalar_type();
  NPU_CHECK(code == ScalarType::Float8_e4m3fn || code == ScalarType::Char, "paged_attention_quantized: caches must be float8_e4m3fn or int8.");
  check_scale(key_scale, key_cache, "key_scale");
  check_scale(value_scale, value_cache, "value_scale");
  NPU_CHECK((key_scale.dim() == 3) == (value_scale.dim() == 3), "paged_attention_quantized: either both scales are by token, or none is.");
  p.code = code == ScalarType::Char ? Code::int8 : Code::e4m3;
  p.key_scale = static_cast<const float*>(key_scale.data_ptr()), p.value_scale = static_cast<const float*>(value_scale.data_ptr());
  p.token_scales = key_scale.dim() == 3;
  if (p.token_scales) {
    p.key_scale_block = key_scale.stride(0), p.key_scale_head = key_scale.stride(1), p.key_scale_token = key_scale.stride(2);
    p.value_scale_block = value_scale.stride(0), p.value_scale_head = value_scale.stride(1), p.value_scale_token = value_scale.stride(2);
  } else {
    p.key_scale_head = key_scale.numel() > 1, p.value_scale_head = value_scale.numel() > 1;
  }
  attend(query, "npu_ops::paged_attention_quantized", p);
}

void varlen_attention(Tensor output, Tensor query, Tensor key, Tensor value, Tensor query_start_loc, double scale, bool causal,
                      int64_t window_left, int64_t window_right, double soft_cap, std::optional<Tensor> alibi_slopes,
                      std::optional<Tensor> sinks, std::optional<Tensor> lse) {
  NPU_CHECK(key.dim() == 3 && value.dim() == 3 && key.size(1) == value.size(1), "varlen_attention: key and value must be [tokens, heads, size].");
  check_same_dtype(query, key, "key");
  check_same_dtype(query, value, "value");
  check_one_device(output, {&key, &value});
  AttentionParams p = common(output, query, query_start_loc, key.size(2), value.size(2), key.size(1),
                             {scale, causal, window_left, window_right, soft_cap, alibi_slopes, sinks, lse});
  const Heads k = heads_of(key, p.tokens, p.kv_heads, p.head_size, "key"), v = heads_of(value, p.tokens, p.kv_heads, p.value_size, "value");
  p.block_size = 1;
  p.key = k.data, p.key_token = k.token, p.key_head = k.head;
  p.value = v.data, p.value_token = v.token, p.value_head = v.head;
  attend(query, "npu_ops::varlen_attention", p);
}

}  // namespace

NPU_OPS(m) {
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("paged_attention_quantized", TORCH_BOX(&paged_attention_quantized));
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention));
}

}  // namespace npu_ops
