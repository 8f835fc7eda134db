// Which format weights in panels are in, by their own shape and their scales' dtype.
#pragma once

#include "bindings/tensors.h"
#include "kernels/weight_only_linear/weight_only_linear.h"

namespace npu_ops {

// uint8 scales are e8m0: MXFP4 or MXFP8, by the codes' bits; those in e4m3: NVFP4. `op` names the op in the error.
inline PanelFormat panel_format(const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& zeros, const char* op) {
  const bool four = weight.size(weight.dim() - 1) == 64, e8m0 = scales.scalar_type() == ScalarType::Byte;
  if (!e8m0 && scales.scalar_type() != ScalarType::Float8_e4m3fn) return four ? PanelFormat::int4 : PanelFormat::int8;
  NPU_CHECK(!zeros && (four || e8m0), op, ": scales in uint8 (e8m0, MXFP4 and MXFP8) go without zeros, those in float8_e4m3fn (NVFP4) with weights of 4 bits, too.");
  return !four ? PanelFormat::mxfp8 : e8m0 ? PanelFormat::mxfp4 : PanelFormat::nvfp4;
}

// Whether `group` elements share a scale as the format has it.
inline void check_group(PanelFormat format, int64_t group, const char* op) {
  const bool nvfp4 = format == PanelFormat::nvfp4;
  NPU_CHECK(is_integer(format) || group == (nvfp4 ? 16 : 32), op, ": groups of ", nvfp4 ? "NVFP4 have 16" : format == PanelFormat::mxfp8 ? "MXFP8 have 32" : "MXFP4 have 32",
            " elements, got ", group, ".");
}

// Rows of 32 that a panel's scales take.
inline int64_t scale_rows(PanelFormat format, int64_t groups) { return groups + (format == PanelFormat::nvfp4 ? kFactorRows : 0); }

// A number of elements that share something, within what sums with it do not overflow: longer than any row it stays.
inline int64_t within_reach(int64_t group) {
  constexpr int64_t kMost = int64_t{1} << 40;
  return group < kMost ? group : kMost;
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
