// The exported table of npu_launch.h.
#pragma once

#include "include/npu_launch.h"

namespace npu {

const npu_launch_table* launch_table();

}  // namespace npu
