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

// Panels of 32 columns that hold `columns`.
inline int64_t panels_of(int64_t columns) { return (columns + 31) / 32; }

// Whether weight is [panels, ceil(k / 4), 128 bytes], codes of 8 bits.
inline bool are_panels(const Tensor& weight, int64_t k) {
  return weight.dim() == 3 && weight.size(1) == (k + 3) / 4 && weight.size(2) == 128 && weight.is_contiguous();
}

// Whether scales for each `group` elements of k, 0: for none, go with the blocks in which panels are multiplied.
inline bool fits_panels(int64_t group, int64_t k) { return (group % 4 == 0 && (128 % (group ? group : 1) == 0 || group % 128 == 0)) || group >= k; }

}  // namespace npu_ops
