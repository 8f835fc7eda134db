// How Python launches a compiled Triton kernel.
#pragma once

#include <pybind11/pybind11.h>

namespace npu {

void define_triton_launcher(pybind11::module_& m);

}  // namespace npu
