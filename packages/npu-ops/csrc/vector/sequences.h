// The requests of a batch whose layers keep a state: which tokens each has, and where its state is. Read on the device, so that a
// recorded launch serves every step.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

struct Sequence {
  int64_t begin, end;  // its tokens
  int64_t slot;        // of its state
  bool has_state;      // otherwise it starts from zero
};

struct Sequences {
  const int32_t* slots;    // [requests], stride_slots apart; 0 (vLLM's null block) and what is no slot: padding, its tokens give zero
  const int32_t* starts;   // [requests + 1], or null: each request has one token
  const bool* has_state;   // [requests], or null: all have one
  int64_t requests, stride_slots, tokens, num_slots;

  // Inlined, as all that tiers share: a copy of its own, compiled with wide instructions, could become the one that all of them call.
  __attribute__((always_inline)) Sequence of(int64_t request) const {
    const int64_t begin = starts ? starts[request] : request, end = starts ? starts[request + 1] : request + 1;
    const int64_t slot = slots[request * stride_slots];
    return {begin < 0 ? 0 : begin, end < tokens ? end : tokens, slot < num_slots ? slot : 0, has_state ? has_state[request] : true};
  }
};

}  // namespace npu_ops
