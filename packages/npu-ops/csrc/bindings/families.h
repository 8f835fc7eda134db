// The ops as C++ functions; what each means is said where it is defined, in npu_ops/definitions.
#pragma once

#include "bindings/tensors.h"

namespace npu_ops {

Tensor rms_norm(Tensor x, Tensor weight, double eps);
void fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps);
Tensor gemma_rms_norm(Tensor x, Tensor weight, double eps);
void fused_add_gemma_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps);

void rotary_embedding(Tensor positions, Tensor query, std::optional<Tensor> key, int64_t head_size, Tensor cos_sin_cache, bool is_neox);
void multimodal_rotary_embedding(Tensor positions, Tensor query, std::optional<Tensor> key, int64_t head_size, Tensor cos_sin_cache,
                                 bool is_neox, std::vector<int64_t> sections, bool interleaved);

Tensor silu_and_mul(Tensor x);
Tensor gelu_and_mul(Tensor x, bool tanh);
Tensor gelu(Tensor x, bool tanh);
Tensor quick_gelu(Tensor x);
Tensor relu2(Tensor x);

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias);
Tensor embedding(Tensor ids, Tensor weight);

void reshape_and_cache(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping);
void paged_attention(Tensor output, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor query_start_loc,
                     Tensor seq_lens, double scale, bool causal, int64_t window_left, int64_t window_right, double soft_cap,
                     std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks);
void varlen_attention(Tensor output, Tensor query, Tensor key, Tensor value, Tensor query_start_loc, double scale, bool causal,
                      int64_t window_left, int64_t window_right, double soft_cap, std::optional<Tensor> alibi_slopes,
                      std::optional<Tensor> sinks);

Tensor argmax(Tensor logits);
void top_k_top_p(Tensor logits, std::optional<Tensor> k, std::optional<Tensor> p);

}  // namespace npu_ops
