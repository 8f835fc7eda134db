// What torch says of a call that failed, such as that the device is out of memory. The macro that torch's headers check their calls with
// names the call alone in the version that we are built for; torch 2.13 and later can be asked for more. Included before those headers.
#pragma once

#include <torch/headeronly/util/shim_utils.h>

extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();  // null before torch 2.13

namespace npu_ops {

[[noreturn]] void throw_torch_error(const char* call, const char* file, int line);

}  // namespace npu_ops

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call)                           \
  if ((call) != TORCH_SUCCESS) {                               \
    npu_ops::throw_torch_error(#call, __FILE__, __LINE__);     \
  }
