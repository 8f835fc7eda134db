// The choice between our linear and torch's, as npu_ops/choices.py sets it.
#include "dispatch/linear_choices.h"

#include "bindings/register.h"
#include "bindings/tensors.h"

namespace npu_ops {
namespace {

bool choose(Tensor like, int64_t n, int64_t k, int64_t measured, int64_t torchs) {
  return choose_linear(dtype_of(like, "like"), n, k, static_cast<uint32_t>(measured), static_cast<uint32_t>(torchs));
}

// -1: not measured, 0: ours, 1: torch's
int64_t chosen(Tensor like, int64_t n, int64_t k, int64_t m) {
  const Choice choice = linear_choice(dtype_of(like, "like"), n, k, m);
  return choice == Choice::unknown ? -1 : choice == Choice::torchs;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(npu_ops, m) {
  m.def("_choose_linear(Tensor like, int n, int k, int measured, int torchs) -> bool");
  m.def("_linear_choice(Tensor like, int n, int k, int m) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(npu_ops, CompositeExplicitAutograd, m) {
  m.impl("_choose_linear", TORCH_BOX(&choose));
  m.impl("_linear_choice", TORCH_BOX(&chosen));
}

}  // namespace npu_ops
