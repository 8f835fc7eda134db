// Every op without an npu kernel runs its CPU kernel on zero-copy aliases: all namespaces, Python kernels included.
#include "aten/fallback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include "aten/alias.h"
#include "aten/indexing.h"
#include "aten/op_info.h"
#include "config/config.h"
#include "faults/watch.h"
#include "runtime/caching_allocator.h"
#include "runtime/device.h"
#include "runtime/generator.h"

namespace npu {
namespace {

using c10::IValue;
using torch::jit::Stack;

const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);
const c10::DispatchKeySet kMetaKeys(c10::DispatchKey::Meta);
const c10::DispatchKeySet kComposite(c10::DispatchKey::PrivateUse3);  // where PyTorch's composite kernels are in reach

void report(const OpInfo& info) {
  const auto how = config().fallback;
  if (C10_LIKELY(how == FallbackReport::silent)) return;
  TORCH_CHECK_NOT_IMPLEMENTED(how != FallbackReport::error, "npu: ", info.name,
                              " has no npu kernel, and NPU_FALLBACK=error forbids its CPU kernel; set NPU_FALLBACK=warn or silent");
  static std::mutex mutex;
  static auto* seen = new std::unordered_set<std::string>;
  std::lock_guard lock(mutex);
  if (seen->insert(info.name).second) TORCH_WARN("npu: ", info.name, " has no npu kernel; its CPU kernel runs on the device's memory");
}

bool has_mask(const OpInfo& info, const Stack& stack) {
  auto is_mask = [](const at::Tensor& tensor) { return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte); };
  for (size_t i = stack.size() - info.arguments; i < stack.size(); ++i) {
    if (!stack[i].isOptionalTensorList()) continue;
    for (const std::optional<at::Tensor>& tensor : stack[i].toOptionalTensorVector()) {
      if (tensor && is_mask(*tensor)) return true;
    }
  }
  return false;
}

// The first arguments of an indexing: self, indices and, where it writes, values (or `out`).
void check_indexing(const OpInfo& info, const Stack& stack) {
  const IValue* arguments = &stack[stack.size() - info.arguments];
  const bool has_values = info.arguments > 2 && arguments[2].isTensor();
  check_devices_of_indexing(arguments[0].toTensor(), arguments[1].toOptionalTensorList(),
                            has_values ? arguments[2].toTensor() : at::Tensor());
}

// Whether the op reads values on the host, as the shape of its result depends on them. That of an indexing does for masks alone.
bool reads_on_host(const OpInfo& info, const Stack& stack) {
  return info.name.starts_with("aten::index.") ? has_mask(info, stack) : info.reads_on_host;
}

// How an op makes its results where the driver does not compute: by its shape function, or, where the result depends on
// values, by its CPU kernel, which finds zeros.
Aliases::Kind kind_of(const OpInfo& info, const Stack& stack) {
  if (C10_LIKELY(computes())) return Aliases::Kind::memory;
  return info.has_shapes && !reads_on_host(info, stack) ? Aliases::Kind::shapes : Aliases::Kind::zeros;
}

// The arguments of a call, replaced by aliases.
class Arguments {
 public:
  Arguments(const OpInfo& info, Stack& stack, Aliases::Kind kind)
      : aliases(kind), info_(info), first_(stack.size() - info.arguments), place_(kind == Aliases::Kind::shapes ? c10::kMeta : c10::kCPU) {
    for (size_t i = 0; i < info.arguments; ++i) move(stack[first_ + i], i);
    TORCH_CHECK(!wrong_generator_, "Expected a 'npu' device type for generator but found 'cpu' (in ", info.name, ")");
    if (C10_UNLIKELY(has_generator_) && aliases.empty() && !named_device_) refuse_values_of_host(stack);
    if (!info.mixes_devices && !info.is_indexing) aliases.check_one_device(info.name.c_str());
    TORCH_CHECK(!writes_to_host_ || aliases.empty() || info.mixes_devices,
                "Expected all tensors to be on the same device, but a result of ", info.name, " is to be written to the cpu");
  }

  Aliases aliases;
  c10::DeviceIndex device() const {
    return aliases.device().value_or(named_device_.value_or(thread_state.device));
  }

  // The default generator is that of the device, which is known only now.
  void choose_generator(Stack& stack) {
    if (info_.is_generator.empty() || !has_values()) return;
    for (size_t i = 0; i < info_.arguments; ++i) {
      if (info_.is_generator[i] && stack[first_ + i].isNone()) stack[first_ + i] = cpu_generator_of(default_generator(device()));
    }
  }

 private:
  bool has_values() const { return place_ != c10::kMeta; }  // a shape function draws no numbers, and some refuse a generator

  void move(IValue& value, size_t index) {
    if (value.isTensor()) {
      value = IValue(alias(value.toTensor(), index));
    } else if (value.isList()) {
      move_list(value, index);
    } else if (value.isDevice()) {
      if (value.toDevice().type() != kNpu) return;
      named_device_ = index_of(value.toDevice());
      value = IValue(c10::Device(place_));
    } else if (value.isGenerator() && !info_.is_generator.empty() && info_.is_generator[index]) {
      const at::Generator generator = value.toGenerator();
      if (!generator.defined()) return;
      has_generator_ = true;
      wrong_generator_ |= generator.device().type() != kNpu;
      if (!wrong_generator_) value = has_values() ? IValue(cpu_generator_of(generator)) : IValue();
    }
  }

  // It is the generator alone that brought the call here.
  void refuse_values_of_host(const Stack& stack) const {
    auto is_of_host = [](const IValue& value) {
      return (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu()) || (value.isDevice() && value.toDevice().is_cpu());
    };
    TORCH_CHECK(std::none_of(stack.begin() + std::ptrdiff_t(first_), stack.end(), is_of_host),
                "Expected a 'cpu' device type for generator but found 'npu' (in ", info_.name, ")");
  }

  // Into a list of its own, since the other is the caller's. Elements are asked, not the list, whose type is slow to compare.
  void move_list(IValue& value, size_t index) {
    const c10::ArrayRef<IValue> elements = value.toListRef();
    if (std::none_of(elements.begin(), elements.end(), [](const IValue& element) { return element.isTensor(); })) return;
    c10::impl::GenericList all(value.toList().elementType());
    all.reserve(elements.size());
    for (const IValue& element : elements) all.push_back(element.isTensor() ? IValue(alias(element.toTensor(), index)) : element);
    value = IValue(std::move(all));
  }

  at::Tensor alias(const at::Tensor& tensor, size_t index) {
    if (info_.is_written[index] && tensor.defined() && tensor.is_cpu()) writes_to_host_ = true;
    return aliases.of(tensor, info_.is_written[index]);
  }

  const OpInfo& info_;
  const size_t first_;
  const c10::DeviceType place_;
  bool writes_to_host_ = false;
  bool has_generator_ = false;
  bool wrong_generator_ = false;
  std::optional<c10::DeviceIndex> named_device_;
};

template <class Visit>
void for_each_tensor(IValue& value, Visit visit) {
  if (value.isTensor()) {
    at::Tensor tensor = std::move(value).toTensor();
    value = IValue(visit(std::move(tensor)));
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list = std::move(value).toTensorList();
    c10::List<at::Tensor> visited;
    for (size_t i = 0; i < list.size(); ++i) {
      at::Tensor tensor = list.extract(i);
      visited.push_back(visit(std::move(tensor)));
    }
    value = IValue(std::move(visited));
  }
}

// NPU_DEBUG=memory: what a kernel allocates lies on the device. A CPU tensor that outlives it (a table that a Python kernel
// caches) is taken for the host's, and is not.
void report_kept(const OpInfo& info, const AllocationLog& log, const Aliases& arguments, Stack& stack) {
  std::unordered_set<const void*> known;
  for (size_t i = stack.size() - info.returns; i < stack.size(); ++i) {
    for_each_tensor(stack[i], [&](at::Tensor&& result) {
      if (result.defined() && result.has_storage()) known.insert(result.storage().data());
      return std::move(result);
    });
  }
  size_t kept = 0;
  for (auto entry = log.entries.rbegin(); entry != log.entries.rend(); ++entry) {
    if (arguments.lie_on(entry->address) || !known.insert(entry->address).second) continue;
    const c10::DeviceIndex device = device_of(entry->address);
    if (CachingAllocator::of(device).requested_of(entry->address) == entry->bytes) kept += entry->bytes;
  }
  if (kept == 0) return;
  TORCH_WARN("npu memory check: kernel ", info.name, " keeps ", kept, " bytes that it allocated. CPU tensors that a kernel makes lie in "
             "device memory, which the host cannot use later; make what is to be kept outside of kernels.");
}

class OpNode final : public AliasNode {
 public:
  OpNode(c10::DeviceIndex device, const OpInfo& info, const c10::OperatorHandle& op, const Stack& stack)
      : AliasNode(device, info.name), op_(op), arguments_(stack.end() - std::ptrdiff_t(info.arguments), stack.end()) {}

 protected:
  void run_kernel(std::vector<at::Tensor>* results) override {
    Stack stack(arguments_);
    op_.redispatchBoxed(kCpuKeys, &stack);
    for (IValue& value : stack) {
      for_each_tensor(value, [&](at::Tensor&& tensor) {
        results->push_back(std::move(tensor));
        return at::Tensor();
      });
    }
  }

 private:
  c10::OperatorHandle op_;
  Stack arguments_;
};

}  // namespace

void enter_fallback(const OpInfo& info) {
  report(info);
  count_fallback();
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const OpInfo& info = info_of(op);
  if (C10_UNLIKELY(has_own_out(info))) return op.redispatchBoxed(kComposite, stack);
  if (info.is_indexing) check_indexing(info, *stack);
  enter_fallback(info);
  if (C10_UNLIKELY(is_capturing()) && reads_on_host(info, *stack)) refuse_during_capture(info.name);
  const Aliases::Kind kind = kind_of(info, *stack);
  Arguments arguments(info, *stack, kind);
  arguments.choose_generator(*stack);
  const c10::DeviceIndex device = arguments.device();
  std::unique_ptr<OpNode> node;
  if (C10_UNLIKELY(is_capturing())) node = std::make_unique<OpNode>(device, info, op, *stack);

  const bool watches_memory = is_watched(kWatchMemory);
  AllocationLog made;
  KernelScope inside(device, info.name.c_str());
  at::AutoDispatchBelowADInplaceOrView below;
  {
    detail::RecordScope recording(node ? &node->log : watches_memory ? &made : thread_state.record);
    auto kernel = [&] { op.redispatchBoxed(kind == Aliases::Kind::shapes ? kMetaKeys : kCpuKeys, stack); };
    detail::submit_for_shapes(device, info.name.c_str(), kernel);
  }
  if (info.writes) arguments.aliases.write_back();
  for (size_t i = stack->size() - info.returns; i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [&](at::Tensor&& tensor) {
      at::Tensor result = arguments.aliases.to_npu(std::move(tensor));
      if (node) node->expect(result);
      note_result_of_kernel(result);
      return result;
    });
  }
  if (C10_UNLIKELY(!made.entries.empty())) report_kept(info, made, arguments.aliases, *stack);
  if (C10_UNLIKELY(node != nullptr)) record_node(std::move(node));
}

// Composites that are not: their bodies ask for a kernel of the tensor's own device, or for one of the devices that they list.
bool is_no_composite(const std::string& name) {
  return name == "aten::conj_physical_" || name == "aten::mode.values" || name == "aten::_grouped_mm";
}

void prefer_fallback_to_composites() {
  using c10::DispatchKey;
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    const auto op = dispatcher.findOp(name);
    const bool has_composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                               op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                               op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const bool runs_on_cpu = op->hasKernelForDispatchKey(DispatchKey::CPU) || is_no_composite(c10::toString(name));
    const bool passed_over = has_composite && runs_on_cpu && !op->hasKernelForDispatchKey(DispatchKey::PrivateUse1);
    if (!passed_over) continue;
    library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace npu
