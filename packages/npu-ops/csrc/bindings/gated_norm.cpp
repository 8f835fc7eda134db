#include "kernels/gated_norm/gated_norm.h"

#include "bindings/launch.h"
#include "bindings/register.h"

namespace npu_ops {
namespace {

Tensor gated_rms_norm(Tensor x, Tensor gate, Tensor weight, double eps, int64_t group, bool norm_first, bool sigmoid) {
  const int64_t width = x.size(x.dim() - 1);
  NPU_CHECK(sizes_of(x) == sizes_of(gate), "gated_rms_norm: x and gate must have one shape.");
  NPU_CHECK(group > 0 && width % group == 0, "gated_rms_norm: the width ", width, " must be a multiple of the group, got ", group, ".");
  NPU_CHECK(weight.dim() == 1 && weight.size(0) == width && weight.is_contiguous(), "gated_rms_norm: weight must be contiguous [", width, "].");
  check_same_dtype(gate, x, "gate");
  check_same_device(gate, x, "gate");
  check_same_device(weight, x, "weight");
  Rows rows = rows_of(x), gates = rows_of(gate);
  // the two may collapse differently: then the one of two strides gives the shape, and the other is copied
  if (rows.inner != gates.inner) {
    if (rows.outer > 1) rows = rows_of(torch::stable::contiguous(x));
    if (gates.outer > 1) gates = rows_of(torch::stable::contiguous(gate));
  }
  Tensor out = empty(sizes_of(x), x);
  const GatedNormParams params{out.data_ptr(), rows.tensor.data_ptr(), gates.tensor.data_ptr(), weight.data_ptr(), rows.outer, rows.inner, width, group,
                               rows.stride_outer, rows.stride_inner, gates.stride_outer, gates.stride_inner, static_cast<float>(eps),
                               dtype_of(x, "x"), dtype_of(weight, "weight"), norm_first, sigmoid};
  if (x.numel() > 0) launch<gated_rms_norm_tiers>(x, "npu_ops::gated_rms_norm", params);
  return out;
}

}  // namespace

NPU_OPS(m) { m.impl("gated_rms_norm", TORCH_BOX(&gated_rms_norm)); }

}  // namespace npu_ops
