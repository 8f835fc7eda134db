// Giving a family's kernels to torch's dispatcher, for the CPU at load and for npu when its device is bound.
#pragma once

#include <torch/csrc/stable/library.h>

namespace npu_ops {

using torch::stable::detail::StableLibrary;
using AddKernels = void (*)(StableLibrary&);

// Registers the kernels for the CPU, and remembers them for npu.
struct Family {
  Family(AddKernels add, const char* file, uint32_t line);
};

// NPU_OPS(m) { m.impl("linear", TORCH_BOX(&linear)); }  at the end of a family's file, in namespace npu_ops
#define NPU_OPS(m)                                                      \
  static void add_family(StableLibrary& m);                             \
  static const Family family(&add_family, __FILE__, __LINE__);          \
  static void add_family(StableLibrary& m)

}  // namespace npu_ops
