#include "kernels/sampling/sampling.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

Tensor argmax(Tensor logits) {
  NPU_CHECK(logits.dim() == 2 && logits.size(1) > 0, "argmax: logits must be [rows, vocabulary > 0].");
  check_dense_rows(logits, "logits");
  Tensor out = empty({logits.size(0)}, logits, ScalarType::Long);
  const ArgmaxParams params{logits.data_ptr(), static_cast<int64_t*>(out.data_ptr()), logits.size(0), logits.size(1), logits.stride(0),
                            dtype_of(logits, "logits")};
  launch<argmax_tiers>(logits, "npu_ops::argmax", params);
  return out;
}

void top_k_top_p(Tensor logits, std::optional<Tensor> k, std::optional<Tensor> p) {
  NPU_CHECK(logits.dim() == 2 && logits.scalar_type() == ScalarType::Float, "top_k_top_p: logits must be float32 [rows, vocabulary].");
  check_dense_rows(logits, "logits");
  check_written(logits, "logits");
  check_same_device(logits, k, "k");
  check_same_device(logits, p, "p");
  const int64_t rows = logits.size(0);
  if (k) NPU_CHECK((is_int64(*k) || is_int32(*k)) && k->numel() == rows && k->is_contiguous(), "top_k_top_p: k must be int32 or int64 [", rows, "].");
  if (p) NPU_CHECK(p->scalar_type() == ScalarType::Float && p->numel() == rows && p->is_contiguous(), "top_k_top_p: p must be float32 [", rows, "].");
  if (!k && !p) return;
  const TopKTopPParams params{static_cast<float*>(logits.data_ptr()), k ? k->data_ptr() : nullptr, k && is_int32(*k),
                              p ? static_cast<const float*>(p->data_ptr()) : nullptr, rows, logits.size(1), logits.stride(0)};
  launch<top_k_top_p_tiers>(logits, "npu_ops::top_k_top_p", params);
}

void check_logits(const Tensor& logits, const char* op) {
  NPU_CHECK(logits.dim() == 2 && logits.scalar_type() == ScalarType::Float && logits.size(1) > 0, op, ": logits must be float32 [rows, vocabulary > 0].");
  check_dense_rows(logits, "logits");
}

// One number a row, of the dtype, next to each other.
template <class T>
const T* one_a_row(const Tensor& t, const Tensor& logits, ScalarType type, const char* what) {
  NPU_CHECK(t.scalar_type() == type && t.numel() == logits.size(0) && t.is_contiguous(), what, " for each of the ", logits.size(0), " rows.");
  check_same_device(t, logits, what);
  return static_cast<const T*>(t.data_ptr());
}

void min_p(Tensor logits, Tensor bound) {
  check_logits(logits, "min_p");
  check_written(logits, "logits");
  const MinPParams params{static_cast<float*>(logits.data_ptr()), one_a_row<float>(bound, logits, ScalarType::Float, "min_p: min_p must be one float32"),
                          logits.size(0), logits.size(1), logits.stride(0)};
  launch<min_p_tiers>(logits, "npu_ops::min_p", params);
}

Tensor random_sample(Tensor logits, Tensor uniform) {
  check_logits(logits, "random_sample");
  Tensor out = empty({logits.size(0)}, logits, ScalarType::Long);
  const RandomSampleParams params{static_cast<const float*>(logits.data_ptr()),
                                  one_a_row<double>(uniform, logits, ScalarType::Double, "random_sample: uniform must be one float64"),
                                  static_cast<int64_t*>(out.data_ptr()), logits.size(0), logits.size(1), logits.stride(0)};
  launch<random_sample_tiers>(logits, "npu_ops::random_sample", params);
  return out;
}

// One number of the dtype for each of somebody's requests, next to each other.
template <class T>
const T* one_a_request(const Tensor& t, const Tensor& logits, int64_t requests, ScalarType type, const char* what) {
  NPU_CHECK(t.dim() == 1 && t.size(0) == requests && t.scalar_type() == type && t.is_contiguous(), what, " for each of the ", requests, " requests.");
  check_same_device(t, logits, what);
  return static_cast<const T*>(t.data_ptr());
}

Tensor seeded_sample(Tensor logits, Tensor requests, Tensor temperature, Tensor seeds, Tensor positions) {
  check_logits(logits, "seeded_sample");
  const int64_t known = seeds.numel();
  Tensor out = empty({logits.size(0)}, logits, ScalarType::Long);
  const SeededSampleParams params{static_cast<const float*>(logits.data_ptr()),
                                  one_a_row<int64_t>(requests, logits, ScalarType::Long, "seeded_sample: requests must be one int64"),
                                  one_a_request<float>(temperature, logits, known, ScalarType::Float, "seeded_sample: temperature must be one float32"),
                                  one_a_request<int64_t>(seeds, logits, known, ScalarType::Long, "seeded_sample: seeds must be one int64"),
                                  one_a_row<int64_t>(positions, logits, ScalarType::Long, "seeded_sample: positions must be one int64"),
                                  static_cast<int64_t*>(out.data_ptr()), logits.size(0), logits.size(1), logits.stride(0), known};
  launch<seeded_sample_tiers>(logits, "npu_ops::seeded_sample", params);
  return out;
}

void counted_penalties(Tensor logits, Tensor requests, Tensor tokens, Tensor drafts, Tensor presence, Tensor frequency, Tensor repetition,
                       Tensor prompt, Tensor counts) {
  check_logits(logits, "counted_penalties");
  check_written(logits, "logits");
  const int64_t width = logits.size(1), known = presence.numel();
  for (const Tensor* each : {&prompt, &counts}) {
    NPU_CHECK(each->dim() == 2 && each->size(0) == known && is_int32(*each), "counted_penalties: prompt and counts must be int32 [", known,
              " requests, any].");
    check_dense_rows(*each, "prompt and counts");
    check_same_device(*each, logits, "prompt and counts");
  }
  NPU_CHECK(counts.size(1) >= width && prompt.size(1) * 32 >= width, "counted_penalties: a vocabulary of ", width, " needs as many counts, got ",
            counts.size(1), ", and as many bits of the prompt, got ", prompt.size(1), " times 32.");
  const char* what = "counted_penalties: each penalty must be one float32";
  const CountedPenaltiesParams params{static_cast<float*>(logits.data_ptr()),
                                      one_a_row<int64_t>(requests, logits, ScalarType::Long, "counted_penalties: requests must be one int64"),
                                      one_a_row<int32_t>(tokens, logits, ScalarType::Int, "counted_penalties: tokens must be one int32"),
                                      one_a_row<int32_t>(drafts, logits, ScalarType::Int, "counted_penalties: drafts must be one int32"),
                                      one_a_request<float>(repetition, logits, known, ScalarType::Float, what),
                                      one_a_request<float>(frequency, logits, known, ScalarType::Float, what),
                                      one_a_request<float>(presence, logits, known, ScalarType::Float, what), static_cast<const int32_t*>(prompt.data_ptr()),
                                      static_cast<const int32_t*>(counts.data_ptr()), logits.size(0), width, logits.stride(0), prompt.stride(0),
                                      counts.stride(0), known};
  launch<counted_penalties_tiers>(logits, "npu_ops::counted_penalties", params);
}

void apply_penalties(Tensor logits, Tensor prompt, Tensor output, Tensor presence, Tensor frequency, Tensor repetition) {
  check_logits(logits, "apply_penalties");
  check_written(logits, "logits");
  for (const Tensor* ids : {&prompt, &output}) {
    NPU_CHECK(ids->dim() == 2 && ids->size(0) == logits.size(0) && is_int64(*ids) && ids->is_contiguous(),
              "apply_penalties: prompt and output must be int64 [", logits.size(0), ", tokens], contiguous.");
    check_same_device(*ids, logits, "prompt and output");
  }
  const char* what = "apply_penalties: each penalty must be one float32";
  const PenaltiesParams params{static_cast<float*>(logits.data_ptr()), static_cast<const int64_t*>(prompt.data_ptr()),
                               static_cast<const int64_t*>(output.data_ptr()), one_a_row<float>(presence, logits, ScalarType::Float, what),
                               one_a_row<float>(frequency, logits, ScalarType::Float, what), one_a_row<float>(repetition, logits, ScalarType::Float, what),
                               logits.size(0), logits.size(1), logits.stride(0), prompt.size(1), output.size(1)};
  launch<apply_penalties_tiers>(logits, "npu_ops::apply_penalties", params);
}

std::tuple<Tensor, Tensor, Tensor> top_logprobs(Tensor logprobs, Tensor tokens, int64_t n) {
  check_logits(logprobs, "top_logprobs");
  const int64_t rows = logprobs.size(0);
  NPU_CHECK(n >= 0 && n <= logprobs.size(1), "top_logprobs: n must be between 0 and the vocabulary's ", logprobs.size(1), ", got ", n, ".");
  Tensor indices = empty({rows, n + 1}, logprobs, ScalarType::Int);
  Tensor values = empty({rows, n + 1}, logprobs);
  Tensor ranks = empty({rows}, logprobs, ScalarType::Long);
  const TopLogprobsParams params{static_cast<const float*>(logprobs.data_ptr()),
                                 one_a_row<int64_t>(tokens, logprobs, ScalarType::Long, "top_logprobs: tokens must be one int64"),
                                 static_cast<int32_t*>(indices.data_ptr()), static_cast<float*>(values.data_ptr()),
                                 static_cast<int64_t*>(ranks.data_ptr()), rows, logprobs.size(1), logprobs.stride(0), n};
  launch<top_logprobs_tiers>(logprobs, "npu_ops::top_logprobs", params);
  return {indices, values, ranks};
}

void recovered_tokens(Tensor output, Tensor cu_num_draft_tokens, Tensor draft, std::optional<Tensor> draft_probs, Tensor target_probs, Tensor noise) {
  check_logits(target_probs, "recovered_tokens");
  check_logits(noise, "recovered_tokens");
  const int64_t tokens = target_probs.size(0), requests = noise.size(0), width = target_probs.size(1);
  for (const Tensor* ids : {&output, &draft})
    NPU_CHECK(is_int32(*ids) && ids->numel() == tokens && ids->is_contiguous(), "recovered_tokens: output and draft must be int32 [", tokens, "].");
  check_one_device(output, {&cu_num_draft_tokens, &draft, &target_probs, &noise});
  check_same_device(output, draft_probs, "draft_probs");
  NPU_CHECK(requests > 0 || tokens == 0, "recovered_tokens: ", tokens, " tokens, but noise for no request.");
  NPU_CHECK(is_int32(cu_num_draft_tokens) && cu_num_draft_tokens.numel() == requests && cu_num_draft_tokens.is_contiguous() && noise.size(1) == width,
            "recovered_tokens: cu_num_draft_tokens must be int32 [requests] and noise float32 [requests, ", width, "].");
  if (draft_probs) {
    check_logits(*draft_probs, "recovered_tokens");
    NPU_CHECK(draft_probs->size(0) == tokens && draft_probs->size(1) == width, "recovered_tokens: draft_probs must have the shape of target_probs.");
  }
  const RecoveredTokensParams params{static_cast<int32_t*>(output.data_ptr()), static_cast<const int32_t*>(cu_num_draft_tokens.data_ptr()),
                                     static_cast<const int32_t*>(draft.data_ptr()), draft_probs ? static_cast<const float*>(draft_probs->data_ptr()) : nullptr,
                                     static_cast<const float*>(target_probs.data_ptr()), static_cast<const float*>(noise.data_ptr()), tokens, requests,
                                     width, draft_probs ? draft_probs->stride(0) : 0, target_probs.stride(0), noise.stride(0)};
  if (tokens > 0) launch<recovered_tokens_tiers>(target_probs, "npu_ops::recovered_tokens", params);
}

}  // namespace

NPU_OPS(m) {
  m.impl("argmax", TORCH_BOX(&argmax));
  m.impl("top_k_top_p", TORCH_BOX(&top_k_top_p));
  m.impl("min_p", TORCH_BOX(&min_p));
  m.impl("random_sample", TORCH_BOX(&random_sample));
  m.impl("seeded_sample", TORCH_BOX(&seeded_sample));
  m.impl("apply_penalties", TORCH_BOX(&apply_penalties));
  m.impl("counted_penalties", TORCH_BOX(&counted_penalties));
  m.impl("top_logprobs", TORCH_BOX(&top_logprobs));
  m.impl("recovered_tokens", TORCH_BOX(&recovered_tokens));
}

}  // namespace npu_ops
