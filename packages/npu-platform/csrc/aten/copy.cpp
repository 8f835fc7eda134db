// Copies between host and device, within a device and between devices; reading one value on the host.
#include <ATen/Dispatch_v2.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/copy_native.h>
#include <torch/library.h>

#include <cstring>

#include "aten/alias.h"
#include "runtime/device.h"
#include "runtime/driver.h"

namespace npu {
namespace {

using at::Tensor;

c10::DeviceIndex device_of_copy(const Tensor& source, const Tensor& target) {
  return target.device().type() == kNpu ? target.device().index() : source.device().index();
}

bool is_plain(const Tensor& source, const Tensor& target) {
  return source.scalar_type() == target.scalar_type() && source.sizes() == target.sizes() && source.is_contiguous() &&
         target.is_contiguous() && !source.is_conj() && !source.is_neg() && !target.is_conj() && !target.is_neg();
}

bool overlap(const Tensor& source, const Tensor& target) {
  const auto* from = static_cast<const char*>(source.const_data_ptr());
  const auto* to = static_cast<const char*>(target.const_data_ptr());
  return to < from + source.nbytes() && from < to + target.nbytes();
}

// The ordinary kernel, with its conversions, on aliases of both sides.
void copy_on_aliases(const Tensor& source, const Tensor& target) {
  const bool two_devices = source.device().type() == kNpu && source.device() != target.device() && target.device().type() == kNpu;
  const Tensor from = two_devices ? owning_alias(source) : source;
  auto kernel = [](const AliasedTensors& aliases) {
    Tensor to = aliases[1];
    return at::native::copy_(to, aliases[0], /*non_blocking=*/false);
  };
  launch_on_aliases("aten::_copy_from", {from, target}, kernel, Devices::mixed);
}

void cross_link(const Tensor& source, const Tensor& target) {
  for (const Tensor& side : {source, target}) {
    if (side.device().type() == kNpu) check_alive(side.device().index());
  }
  meet_transfer_faults(device_of_copy(source, target));
}

void copy_bytes(c10::DeviceIndex device, const Tensor& source, const Tensor& target) {
  at::assert_no_partial_overlap(target, source);
  if (overlap(source, target) && computes()) return copy_on_aliases(source, target);
  KernelScope inside(device, "aten::_copy_from");
  submit_copy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes(), device);
  note_result_of_kernel(target);
}

// Where the driver does not compute, a copy that converts or is captured is a launch, and the host receives zeros.
void copy_zeros(c10::DeviceIndex device, const Tensor& source, const Tensor& target) {
  TORCH_CHECK(at::is_expandable_to(source.sizes(), target.sizes()), "npu: a tensor of shape ", source.sizes(),
              " cannot be copied to one of shape ", target.sizes());
  launch(device, "aten::_copy_from", [] {});
  if (target.is_cpu()) target.zero_();
}

void transfer(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool crosses = source.device() != target.device();
  if (is_watched() && crosses) cross_link(source, target);
  const c10::DeviceIndex device = device_of_copy(source, target);
  const bool of_two = crosses && source.device().type() == target.device().type() && !is_capturing();
  if (of_two) wait_between_devices(device, source.device().index());
  if (!is_capturing() && is_plain(source, target)) {
    copy_bytes(device, source, target);
  } else if (computes()) {
    copy_on_aliases(source, target);
  } else {
    copy_zeros(device, source, target);
  }
  if (is_capturing()) return;
  if (of_two) wait_between_devices(source.device().index(), device);  // before it writes to the source, or to what is freed
  if (!non_blocking && crosses) wait_for_stream(device);
}

// A replay repeats a copy at the same addresses: pinned memory stays, pageable memory may be gone.
void refuse_pageable(const Tensor& source, const Tensor& target) {
  if (target.is_cpu() && !target.is_pinned()) refuse_during_capture("a copy to pageable host memory (aten::_copy_from)");
  if (source.is_cpu() && source.dim() > 0 && !source.is_pinned()) {
    refuse_during_capture("a copy from pageable host memory (aten::_copy_from)");
  }
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (C10_UNLIKELY(is_capturing())) refuse_pageable(source, target);
  transfer(source, target, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (C10_UNLIKELY(is_capturing())) refuse_pageable(source, target);
  target.resize_(source.sizes());
  transfer(source, target, /*non_blocking=*/false);
  return target;
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  refuse_during_capture("reading a value on the host (item(), aten::_local_scalar_dense)");
  const c10::DeviceIndex device = self.device().index();
  if (is_watched()) meet_transfer_faults(device);
  alignas(16) char value[16];
  {
    KernelScope inside(device, "aten::_local_scalar_dense");
    submit_copy(value, self.const_data_ptr(), self.element_size(), device);
    wait_for_stream(device);
  }
  return AT_DISPATCH_V2(self.scalar_type(), "item", AT_WRAP([&] {
    scalar_t scalar;
    std::memcpy(&scalar, value, sizeof scalar);
    return c10::Scalar(scalar);
  }), AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX), AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), AT_EXPAND(AT_FLOAT8_TYPES), at::kComplexHalf,
                        at::kHalf, at::kBool, at::kBFloat16);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

// A copy handles lazy conjugation and negation itself. Without this, clone -> copy_ -> _copy_from -> clone ... for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

}  // namespace npu
