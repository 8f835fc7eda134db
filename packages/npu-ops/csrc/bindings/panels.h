// Which format weights in panels are in, by their own shape and their scales' dtype.
#pragma once

#include "bindings/tensors.h"
#include "kernels/weight_only_linear/weight_only_linear.h"

namespace npu_ops {

// uint8 scales are e8m0: MXFP4. `op` names the op in the error.
inline PanelFormat panel_format(const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& zeros, const char* op) {
  const bool four = weight.size(weight.dim() - 1) == 64;
  if (scales.scalar_type() != ScalarType::Byte) return four ? PanelFormat::int4 : PanelFormat::int8;
  NPU_CHECK(four && !zeros, op, ": scales in uint8 (e8m0, MXFP4) go with weights of 4 bits and without zeros.");
  return PanelFormat::mxfp4;
}

}  // namespace npu_ops
