// Indexing by tensors, called on every step of a sampler: the fallback without boxed lists, whose types are slow to compare.
#include "aten/indexing.h"

#include <ATen/ops/index.h>
#include <torch/library.h>

#include "aten/alias.h"
#include "aten/fallback.h"
#include "aten/op_info.h"

namespace npu {
namespace {

using at::Tensor;
using Indices = c10::List<std::optional<Tensor>>;

bool is_mask(const Tensor& tensor) { return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte; }

void check_device_of_index(const Tensor& self, const Tensor& index) {
  TORCH_CHECK(index.device() == self.device() || index.is_cpu(),
              "npu: indices should be either on cpu or on the same device as the indexed tensor (", self.device(), "), but one is on ",
              index.device(), "; move it there first, with .to(\"", self.device(), "\")");
}

Tensor index(const Tensor& self, const Indices& indices) {
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::index", "Tensor");
  AliasedTensors arguments{self};
  uint64_t given = 0;  // by dimension: whether there is an index; a tensor has at most 64
  bool has_mask = false;
  for (size_t i = 0; i < indices.size(); ++i) {
    const std::optional<Tensor> each = indices.get(i);
    if (!each || !each->defined()) continue;
    check_device_of_index(self, *each);
    has_mask |= is_mask(*each);
    given |= uint64_t(1) << i;
    arguments.push_back(*each);
  }
  if (has_mask || !computes()) {
    torch::jit::Stack stack{self, indices};
    fallback(op, &stack);
    return std::move(stack[0]).toTensor();
  }
  enter_fallback(info_of(op));
  return launch_on_aliases("aten::index.Tensor", std::move(arguments), [given, dimensions = indices.size()](const AliasedTensors& aliases) {
    Indices places;
    places.reserve(dimensions);
    size_t next = 1;
    for (size_t i = 0; i < dimensions; ++i) {
      places.push_back(given >> i & 1 ? std::optional(aliases[next++]) : std::nullopt);
    }
    return at::index(aliases[0], places);
  }, Devices::mixed);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("index.Tensor", index); }

}  // namespace

void check_devices_of_indexing(const Tensor& self, const Indices& indices, const Tensor& values) {
  for (size_t i = 0; i < indices.size(); ++i) {
    const std::optional<Tensor> each = indices.get(i);
    if (each && each->defined()) check_device_of_index(self, *each);
  }
  if (!values.defined()) return;
  TORCH_CHECK(values.device() == self.device() || (values.is_cpu() && values.dim() == 0),
              "Expected all tensors to be on the same device, but found at least two devices, ", self.device(), " and ",
              values.device(), "! (values for an indexed tensor)");
}

}  // namespace npu
