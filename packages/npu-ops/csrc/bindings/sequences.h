// The requests of a batch whose layers keep a state, checked.
#pragma once

#include "bindings/tensors.h"
#include "vector/sequences.h"

namespace npu_ops {

// slots: int32 [requests]; starts: int32 [requests + 1] or none, for one token each; has_state: bool [requests] or none, for all.
// `state` has a slot a row.
inline Sequences sequences_of(const char* op, const Tensor& on, const Tensor& state, const Tensor& slots, const std::optional<Tensor>& starts,
                              const std::optional<Tensor>& has_state, int64_t tokens) {
  const int64_t requests = slots.numel();
  NPU_CHECK(slots.dim() == 1 && is_int32(slots), op, ": state_indices must be int32 [requests].");
  check_same_device(slots, on, "state_indices");
  if (starts) {
    NPU_CHECK(is_int32(*starts) && starts->numel() == requests + 1 && starts->is_contiguous(), op, ": query_start_loc must be int32 [", requests + 1, "].");
    check_same_device(*starts, on, "query_start_loc");
  } else {
    NPU_CHECK(tokens == requests, op, ": without query_start_loc each of the ", requests, " requests has one token, but there are ", tokens, ".");
  }
  if (has_state) {
    NPU_CHECK(has_state->scalar_type() == ScalarType::Bool && has_state->numel() == requests && has_state->is_contiguous(), op,
              ": has_initial_state must be bool [", requests, "].");
    check_same_device(*has_state, on, "has_initial_state");
  }
  return {static_cast<const int32_t*>(slots.data_ptr()), starts ? static_cast<const int32_t*>(starts->data_ptr()) : nullptr,
          has_state ? static_cast<const bool*>(has_state->data_ptr()) : nullptr, requests, requests ? slots.stride(0) : 1, tokens, state.size(0)};
}

}  // namespace npu_ops
