// Reductions of one contribution a rank, elementwise and in rank order: every rank computes the same bits.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace npu {

// Raises ValueError with the way out when the op is not defined for the dtype (or not at all).
void check_reduction(const char* collective, c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);

// The op that is run for the op asked for: sums and products of bools stay bools.
c10d::ReduceOp::RedOpType op_of(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);

// output[i] = inputs[0][i] op inputs[1][i] op ...; bfloat16 and float16 are accumulated in float and rounded once.
// `inputs` may contain `output`.
void reduce(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op, c10::ArrayRef<const void*> inputs, void* output, int64_t count);

}  // namespace npu
