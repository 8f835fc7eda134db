// Whether a tier's products of bf16 are worth its instructions on this processor: measured once, in microseconds.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

// False: the tier below multiplies faster. A tier without a body always pays. Only for a tier whose instructions the machine has.
NPU_IN_EACH_TIER(products_pay, bool)

}  // namespace npu_ops
