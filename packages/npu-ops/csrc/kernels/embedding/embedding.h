// Rows of a table by index.
#pragma once

#include "dispatch/kernel_table.h"

namespace npu_ops {

struct EmbeddingParams {
  const void* ids;
  bool ids_are_32_bit;
  const void* weight;
  void* out;  // contiguous
  int64_t count, vocabulary;
  int64_t row_bytes, weight_stride;  // bytes
};

}  // namespace npu_ops
