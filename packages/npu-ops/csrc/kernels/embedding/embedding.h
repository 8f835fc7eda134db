// Rows of a table by index.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

struct EmbeddingParams {
  const void* ids;
  bool ids_are_32_bit;
  const void* weight;
  void* out;  // contiguous
  int64_t count, vocabulary;
  int64_t row_bytes, weight_stride;  // bytes
};

NPU_KERNEL(embedding, EmbeddingParams)

}  // namespace npu_ops
