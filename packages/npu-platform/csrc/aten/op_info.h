// What the fallback needs to know of an op: found out from its schema and its kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace npu {

struct OpInfo {
  size_t arguments = 0;
  size_t returns = 0;
  bool writes = false;
  bool has_shapes = false;            // a kernel for meta tensors, or one made of other ops
  bool reads_on_host = false;         // its result, or the result's shape, depends on values in device memory
  bool mixes_devices = false;         // CPU tensors beside npu tensors are part of its contract
  bool is_indexing = false;           // by tensors: of indices and values, some may be of the host
  std::vector<bool> is_generator;     // by argument; empty when there is none
  std::vector<bool> is_written;       // by argument
  std::vector<c10::OperatorHandle> outs;  // where PyTorch composes the op of its out= variant: those that it may be
  std::string name;

  bool operator==(const OpInfo&) const = default;
};

// Found out once per thread, and again when an op has been registered since, perhaps in place of another. Raises
// NotImplementedError for an op without a CPU kernel.
const OpInfo& info_of(const c10::OperatorHandle& op);

// Whether somebody registered a kernel for the out= variant: it serves the whole op, as on any device.
bool has_own_out(const OpInfo& info);

}  // namespace npu
