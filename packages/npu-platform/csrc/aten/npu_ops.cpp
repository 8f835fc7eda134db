// torch.ops.npu: what other libraries ask of the device through the dispatcher.
#include <torch/library.h>

#include "aten/weak_ref.h"
#include "runtime/launch_table.h"

namespace npu {
namespace {

int64_t launch_table_address() { return reinterpret_cast<int64_t>(launch_table()); }

}  // namespace

TORCH_LIBRARY(npu, m) {
  m.def("launch_table() -> int", launch_table_address);
  m.def("weak_ref_tensor(Tensor input) -> Tensor");
}

TORCH_LIBRARY_IMPL(npu, PrivateUse1, m) { m.impl("weak_ref_tensor", weak_ref_tensor); }

}  // namespace npu
