// The pairs (token, expert) sorted by expert.
#pragma once

#include "kernels/moe/moe.h"
#include "vector/vec.h"

namespace npu_ops::NPU_TIER {
namespace {

// The pairs of one expert of this rank that has any.
struct ExpertSlice {
  int32_t expert;
  int32_t from, count;  // in `order`
  int32_t packed;       // its first row of the packed tokens; -1: too many for that
  int32_t item;         // its first work item of the first pass
};

// Where everything lies in `lists` (6 * experts + pairs): a slice an expert, then the pairs sorted by expert.
struct Routing {
  ExpertSlice* slices;
  int32_t* order;  // pair = token * top_k + k
  int64_t num_slices, pairs, packed_rows;
};

inline int64_t local_expert(const ExpertsParams& p, int64_t pair) {
  const int64_t id = p.ids_are_int64 ? static_cast<const int64_t*>(p.ids)[pair] : static_cast<const int32_t*>(p.ids)[pair];
  if (id < 0 || id >= p.global_experts) return -1;
  const int64_t expert = p.expert_map ? p.expert_map[id] : id;
  return expert < p.experts ? expert : -1;
}

// A stable counting sort.
inline Routing sort_by_expert(const ExpertsParams& p, int32_t* lists, int64_t few_tokens = kFewTokens) {
  static_assert(sizeof(ExpertSlice) == 5 * sizeof(int32_t));
  Routing r{reinterpret_cast<ExpertSlice*>(lists), lists + 5 * p.experts, 0, 0, 0};
  int32_t* next = r.order + p.tokens * p.top_k;
  memset(next, 0, sizeof(int32_t) * p.experts);
  for (int64_t pair = 0; pair < p.tokens * p.top_k; ++pair) {
    const int64_t e = local_expert(p, pair);
    if (e >= 0) ++next[e];
  }
  for (int64_t e = 0; e < p.experts; ++e) {
    const int32_t count = next[e];
    next[e] = static_cast<int32_t>(r.pairs);
    if (count == 0) continue;
    const bool few = count <= few_tokens;
    r.slices[r.num_slices++] = {static_cast<int32_t>(e), next[e], count, few ? static_cast<int32_t>(r.packed_rows) : -1, 0};
    r.pairs += count;
    if (few) r.packed_rows += count;
  }
  for (int64_t pair = 0; pair < p.tokens * p.top_k; ++pair) {
    const int64_t e = local_expert(p, pair);
    if (e >= 0) r.order[next[e]++] = static_cast<int32_t>(pair);
  }
  return r;
}

}  // namespace
}  // namespace npu_ops::NPU_TIER
