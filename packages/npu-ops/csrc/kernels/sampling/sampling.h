// Choosing a token: penalties, the top-k / top-p / min-p masks without a sort, the greedy and the random choice, logprobs.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

struct ArgmaxParams {
  const void* logits;  // [rows, width], rows `stride` apart
  int64_t* out;        // [rows]
  int64_t rows, width, stride;
  Dtype dtype;
};

struct TopKTopPParams {
  float* logits;  // [rows, width], rows `stride` apart
  const void* k;  // [rows] or null
  bool k_is_32_bit;
  const float* p;  // [rows] or null
  int64_t rows, width, stride;
};

struct MinPParams {
  float* logits;      // [rows, width], rows `stride` apart
  const float* min_p;  // [rows]
  int64_t rows, width, stride;
};

struct RandomSampleParams {
  const float* logits;    // [rows, width], rows `stride` apart
  const double* uniform;  // [rows], in [0, 1)
  int64_t* out;           // [rows]
  int64_t rows, width, stride;
};

struct SeededSampleParams {
  const float* logits;       // [rows, width], rows `stride` apart, divided by their temperatures
  const int64_t* requests;   // [rows]: where a row's request has its temperature and its seed; outside of them: it has none
  const float* temperature;  // [requests], 0: the highest logit is chosen
  const int64_t* seeds;      // [requests]
  const int64_t* positions;  // [rows]
  int64_t* out;              // [rows]
  int64_t rows, width, stride, known;  // known: requests
};

struct PenaltiesParams {
  float* logits;          // [rows, width], rows `stride` apart
  const int64_t* prompt;  // [rows, prompt_length]; ids outside the vocabulary are padding
  const int64_t* output;  // [rows, output_length]
  const float *presence, *frequency, *repetition;  // [rows]
  int64_t rows, width, stride, prompt_length, output_length;
};

struct CountedPenaltiesParams {
  float* logits;            // [rows, width], rows `stride` apart
  const int64_t* requests;  // [rows]: where a row's request has its penalties and counts; outside of them: it has none
  const int32_t* tokens;    // [rows]: what was put in
  const int32_t* drafts;    // [rows]: so many rows up to this one put in a draft, which counts as put out
  const float *repetition, *frequency, *presence;  // [requests]
  const int32_t* prompt;    // [requests, width / 32], rows `stride_prompt` apart: a bit for each token that the prompt has
  const int32_t* counts;    // [requests, width], rows `stride_counts` apart: times that each token was put out
  int64_t rows, width, stride, stride_prompt, stride_counts, known;  // known: requests
};

struct TopLogprobsParams {
  const float* logprobs;  // [rows, width], rows `stride` apart
  const int64_t* tokens;  // [rows]
  int32_t* indices;       // [rows, n + 1]
  float* values;          // [rows, n + 1]
  int64_t* ranks;         // [rows]
  int64_t rows, width, stride, n;
};

struct RecoveredTokensParams {
  int32_t* out;            // [tokens]
  const int32_t* ends;     // [requests]: the first token after each request's
  const int32_t* draft;    // [tokens]: the token that was proposed
  const float* proposal;   // [tokens, width] its distribution; null: it was certain
  const float* target;     // [tokens, width]
  const float* noise;      // [requests, width]
  int64_t tokens, requests, width, stride_proposal, stride_target, stride_noise;
};

NPU_KERNEL(argmax, ArgmaxParams)
NPU_KERNEL(top_k_top_p, TopKTopPParams)
NPU_KERNEL(min_p, MinPParams)
NPU_KERNEL(random_sample, RandomSampleParams)
NPU_KERNEL(seeded_sample, SeededSampleParams)
NPU_KERNEL(apply_penalties, PenaltiesParams)
NPU_KERNEL(counted_penalties, CountedPenaltiesParams)
NPU_KERNEL(top_logprobs, TopLogprobsParams)
NPU_KERNEL(recovered_tokens, RecoveredTokensParams)

}  // namespace npu_ops
