// Collectives between the ranks of one host, over the memory that they share.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "distributed/shared_segment.h"

namespace npu {

// One call of a collective: its name and how long it may take.
struct SharedCall {
  SharedSegment& segment;
  const char* name;
  Deadline deadline;
};

// What is reduced: `count` elements.
struct Reduction {
  c10::ScalarType dtype;
  c10d::ReduceOp::RedOpType op;
  int64_t count;
};

using Bytes = std::byte*;
using ConstBytes = const std::byte*;

// All pointers are to plain memory of the lengths that the call implies; larger tensors go in pieces. They return when
// this rank's part is done: a root may be ahead of the others, as with any backend.
void shared_all_reduce(const SharedCall& call, const Reduction& what, Bytes data);
void shared_reduce(const SharedCall& call, const Reduction& what, Bytes data, int root);
// inputs[r] is what rank r gets, `what.count` elements each.
void shared_reduce_scatter(const SharedCall& call, const Reduction& what, c10::ArrayRef<ConstBytes> inputs, Bytes output);
void shared_broadcast(const SharedCall& call, Bytes data, size_t bytes, int root);
// outputs[r] takes the `sizes[r]` bytes of rank r.
void shared_all_gather(const SharedCall& call, ConstBytes input, c10::ArrayRef<Bytes> outputs, c10::ArrayRef<size_t> sizes);
void shared_gather(const SharedCall& call, ConstBytes input, c10::ArrayRef<Bytes> outputs, size_t bytes, int root);
void shared_scatter(const SharedCall& call, c10::ArrayRef<ConstBytes> inputs, Bytes output, size_t bytes, int root);
// inputs[r], `given[r]` bytes, are for rank r, and outputs[r] takes the `taken[r]` bytes that rank r has for this one.
void shared_all_to_all(const SharedCall& call, c10::ArrayRef<ConstBytes> inputs, c10::ArrayRef<size_t> given, c10::ArrayRef<Bytes> outputs,
                       c10::ArrayRef<size_t> taken);
void shared_barrier(const SharedCall& call);

}  // namespace npu
