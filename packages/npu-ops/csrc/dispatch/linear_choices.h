// For which shapes torch's linear was measured to be faster than ours. npu_ops/choices.py measures; linear asks at each call.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

enum class Choice { unknown, ours, torchs };

// Rows of x are counted in powers of two: bucket 0 is one row, 1 two, 2 up to four, ...; beyond the last measured, that one counts.
constexpr int kRowBuckets = 16;

// What was chosen for the current tier, x [m, k] and a weight [n, k].
Choice linear_choice(Dtype dtype, int64_t n, int64_t k, int64_t m);
// Bit b of `measured`: bucket b is known; of `torchs`: torch's is the faster one there. Replaces what was known of the shape. False
// when the table has no room left.
bool choose_linear(Dtype dtype, int64_t n, int64_t k, uint32_t measured, uint32_t torchs);

}  // namespace npu_ops
