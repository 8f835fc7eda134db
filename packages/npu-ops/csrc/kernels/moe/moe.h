// Mixture of experts: the choice of experts for each token, and the chosen experts' feed-forward layers.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

enum class Scoring : int { softmax, sigmoid };

struct SelectExpertsParams {
  const void* logits;  // [tokens, experts], rows `stride` apart
  const void* bias;    // [experts] or null: added to the scores for the choice only
  float* weights;      // [tokens, top_k]
  int32_t* ids;        // [tokens, top_k]
  int64_t tokens, experts, stride, top_k;
  int64_t groups, top_groups;  // experts come in `groups` of one size, of which the best top_groups take part; 0: no groups
  float scale;
  Dtype dtype, bias_dtype;
  Scoring scoring;
  bool renormalize;
};

enum class ExpertActivation : int { silu, gelu_erf, gelu_tanh, relu2 };

// What experts take in whatever format their weights are.
struct ExpertsParams {
  const void* x;             // [tokens, hidden], rows stride_x apart
  const void* bias13;        // [experts, rows of gate and up] or null
  const void* bias2;         // [experts, hidden] or null
  const float* weights;      // [tokens, top_k]
  const void* ids;           // [tokens, top_k], int32 or int64
  const int32_t* expert_map;  // [global experts]: index of the weights here, -1: not here; or null
  void* out;                 // [tokens, hidden] contiguous
  int64_t tokens, hidden, width, experts, global_experts, top_k, stride_x;
  float alpha, beta, limit;  // of silu: gate = min(gate, limit), up in [-limit, limit], gate * sigmoid(alpha gate) * (up + beta)
  Dtype dtype;
  ExpertActivation activation;
  bool gated, interleaved;  // gate and up rows in turn, or all gates first
  bool weigh_input;         // the weights multiply x instead of the experts' output
  bool ids_are_int64;
};

struct FusedExpertsParams : ExpertsParams {
  const void* w13;  // [experts, rows of gate and up, hidden]
  const void* w2;   // [experts, hidden, width]
  void* activated;  // workspace: [tokens * top_k + kSliceRows - 1 for each expert that may have any, width rounded up to kActivatedStep]
  float* packed;    // workspace: packed_rows(...) * (hidden or width, rounded up to 64, and 64)
  int32_t* lists;   // workspace: list_length(...)
  int64_t stride_w13, stride_w2, expert_stride_w13, expert_stride_w2;
  int64_t few;  // tokens of an expert up to which they are multiplied along the weight rows as stored, each read once from memory
};

// The most for `few` with which that is the faster way.
constexpr int64_t kFewTokens = 12;

constexpr int64_t kSliceRows = 16, kActivatedStep = 32;  // of tiles

// Experts with fewer tokens each, on average, wait for their weights.
__attribute__((always_inline)) constexpr bool multiplies(const FusedExpertsParams& p) {
  return p.dtype == Dtype::bf16 && p.tokens * p.top_k > kFewTokens * p.global_experts;
}

// Not of select_experts: who reads its choices may not know of padding, and needs experts that exist.
constexpr void leave_out(FusedExpertsParams& p, const Padding& padding) { p.tokens = padding.without(p.tokens); }

NPU_KERNEL(select_experts, SelectExpertsParams)
NPU_KERNEL(fused_experts, FusedExpertsParams)

}  // namespace npu_ops
