// Layouts that the device has no tensors of: the ops that would make or take one say so.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace npu {
namespace {

constexpr char kSparse[] = "sparse", kSparseCompressed[] = "sparse compressed", kNested[] = "nested", kQuantized[] = "quantized";

template <const char* layout>
void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "npu: its tensors are dense and not quantized, and ", c10::toString(op.operator_name()),
                              " was called for a ", layout, " tensor; take the tensors to the CPU first, with .cpu()");
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<kSparse>>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<kSparseCompressed>>());
}
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<kNested>>()); }
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse<kQuantized>>()); }

}  // namespace
}  // namespace npu
