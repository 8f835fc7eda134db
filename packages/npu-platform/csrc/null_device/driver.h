// The null device as a driver: it computes nothing, and keeps time, shapes and the account of its memory.
#pragma once

#include "include/npu_driver.h"

namespace npu::null {

const npu_driver* driver();

}  // namespace npu::null
