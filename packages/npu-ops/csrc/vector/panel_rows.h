// Codes of 8 bits from panels (vector/panels.h) back to rows, as checkpoints have them.
#pragma once

#include "vector/panels.h"

namespace npu_ops {
namespace {

// out[k] = column n of `panels`, whose columns have k codes.
NPU_INLINE void row_of_panels(uint8_t* out, const uint8_t* panels, int64_t n, int64_t k) {
  constexpr int64_t kEight = kColumns / kVectors, kUnit = Bytes::kUnit;
  const int64_t column = n % kColumns;
  const uint8_t* units = panels + n / kColumns * ceil_div(k, 4) * kUnit + column / kEight * (kUnit / kVectors) + column % kEight * 2;
  for (int64_t i = 0; i < k; ++i) out[i] = units[i / 4 * kUnit + i % 4 / 2 * 2 * kEight + i % 2];
}

}  // namespace
}  // namespace npu_ops
