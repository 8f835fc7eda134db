// What the processor and the operating system let this process use.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

// The highest tier that this processor runs and this operating system saves the registers of.
Tier detect_tier();

}  // namespace npu_ops
