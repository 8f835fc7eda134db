// The simulator as a driver.
#pragma once

#include "include/npu_driver.h"

namespace npu::sim {

const npu_driver* driver();

}  // namespace npu::sim
