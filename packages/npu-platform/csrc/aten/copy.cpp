// Copies between host and device, within a device and between devices; reading one value on the host.
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/copy_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "aten/alias.h"
#include "runtime/device.h"

namespace npu {
namespace {

using at::Tensor;

constexpr size_t kChunk = size_t(1) << 20;

c10::DeviceIndex device_of_copy(const Tensor& source, const Tensor& target) {
  return target.device().type() == kNpu ? target.device().index() : source.device().index();
}

bool is_plain(const Tensor& source, const Tensor& target) {
  return source.scalar_type() == target.scalar_type() && source.sizes() == target.sizes() && source.is_contiguous() &&
         target.is_contiguous() && !source.is_conj() && !source.is_neg() && !target.is_conj() && !target.is_neg();
}

void copy_bytes(char* target, const char* source, size_t bytes) {
  const bool overlap = target < source + bytes && source < target + bytes;
  if (overlap || bytes < 4 * kChunk) {
    std::memmove(target, source, bytes);
    return;
  }
  struct Range {
    char* target;
    const char* source;
    size_t bytes;
  } range{target, source, bytes};
  auto body = [](void* context, int64_t begin, int64_t end) {
    const auto& all = *static_cast<Range*>(context);
    const size_t from = size_t(begin) * kChunk, to = std::min(size_t(end) * kChunk, all.bytes);
    std::memcpy(all.target + from, all.source + from, to - from);
  };
  npu_parallel_for(0, int64_t((bytes + kChunk - 1) / kChunk), 1, body, &range);
}

// The ordinary kernel, with its conversions, on aliases of both sides.
void copy_on_aliases(const Tensor& source, const Tensor& target) {
  const bool two_devices = source.device().type() == kNpu && source.device() != target.device() && target.device().type() == kNpu;
  const Tensor from = two_devices ? owning_alias(source) : source;
  auto kernel = [](const std::vector<Tensor>& aliases) {
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

void copy(const Tensor& source, const Tensor& target) {
  if (sim::is_watched() && source.device() != target.device()) cross_link(source, target);
  if (is_capturing() || !is_plain(source, target)) return copy_on_aliases(source, target);
  at::assert_no_partial_overlap(target, source);
  launch(device_of_copy(source, target), "aten::_copy_from", [&source, &target] {
    if (source.nbytes() == 0) return;
    copy_bytes(static_cast<char*>(target.mutable_data_ptr()), static_cast<const char*>(source.const_data_ptr()), source.nbytes());
    note_result_of_kernel(target);
  });
}

// A replay repeats a copy at the same addresses: pinned memory stays, pageable memory may be gone.
void refuse_pageable(const Tensor& source, const Tensor& target) {
  if (target.is_cpu() && !target.is_pinned()) refuse_during_capture("a copy to pageable host memory (aten::_copy_from)");
  if (source.is_cpu() && source.dim() > 0 && !source.is_pinned()) {
    refuse_during_capture("a copy from pageable host memory (aten::_copy_from)");
  }
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  if (C10_UNLIKELY(is_capturing())) refuse_pageable(source, target);
  copy(source, target);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (C10_UNLIKELY(is_capturing())) refuse_pageable(source, target);
  target.resize_(source.sizes());
  copy(source, target);
  return target;
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  refuse_during_capture("reading a value on the host (item(), aten::_local_scalar_dense)");
  Aliases aliases;
  const Tensor alias = aliases.to_cpu(self);
  if (sim::is_watched()) meet_transfer_faults(self.device().index());
  KernelScope inside(self.device().index(), "aten::_local_scalar_dense");
  return at::native::_local_scalar_dense_cpu(alias);
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
