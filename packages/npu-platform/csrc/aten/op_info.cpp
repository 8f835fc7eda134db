#include "aten/op_info.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string_view>
#include <unordered_map>

#include "runtime/driver.h"

namespace npu {
namespace {

// By name without overload: the out= variants of all ops of aten.
const std::unordered_map<std::string, std::vector<c10::OperatorHandle>>& out_variants() {
  static const auto* all = [] {
    auto* found = new std::unordered_map<std::string, std::vector<c10::OperatorHandle>>;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (name.getNamespace() != "aten" || !name.overload_name.ends_with("out")) continue;
      (*found)[name.name].push_back(*dispatcher.findOp(name));
    }
    return found;
  }();
  return *all;
}

std::vector<c10::OperatorHandle> outs_of(const c10::OperatorHandle& op) {
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) return {};
  std::string name = op.operator_name().name;
  if (name.ends_with('_')) name.pop_back();
  const auto found = out_variants().find(name);
  return found == out_variants().end() ? std::vector<c10::OperatorHandle>() : found->second;
}

constexpr std::string_view kNamespace = "aten::";

std::string_view without_overload(std::string_view name) { return name.substr(0, name.find('.')); }

// tensor[indices], and what it is assigned.
bool is_indexing(std::string_view name) {
  constexpr std::array<std::string_view, 6> all{"aten::index",            "aten::index_put",     "aten::index_put_",
                                                "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};
  return std::find(all.begin(), all.end(), without_overload(name)) != all.end();
}

// aten ops that take CPU tensors with dimensions beside device tensors, as on other accelerators.
bool may_mix_devices(std::string_view name) {
  if (!name.starts_with(kNamespace)) return true;
  name = without_overload(name).substr(kNamespace.size());
  for (std::string_view taken : {"copy", "copy_", "_copy_from", "_copy_from_and_resize", "_to_copy", "_foreach_copy",
                                 "_foreach_copy_"}) {
    if (name == taken) return true;
  }
  for (std::string_view part : {"set_", "ctc_loss", "pack_padded", "pad_packed", "tensor_split"}) {
    if (name.find(part) != std::string_view::npos) return true;
  }
  return false;
}

// Not hasComputedKernelForDispatchKey(): PyTorch has a fallback for meta tensors, which raises.
bool has_shape_function(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  for (const DispatchKey key : {DispatchKey::Meta, DispatchKey::CompositeExplicitAutograd,
                                DispatchKey::CompositeExplicitAutogradNonFunctional, DispatchKey::CompositeImplicitAutograd}) {
    if (op.hasKernelForDispatchKey(key)) return true;
  }
  return false;
}

OpInfo inspect(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  OpInfo info;
  info.name = c10::toString(op.operator_name());
  info.arguments = schema.arguments().size();
  info.returns = schema.returns().size();
  info.outs = outs_of(op);
  info.writes = schema.is_mutable();
  info.has_shapes = has_shape_function(op);
  info.reads_on_host = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  info.mixes_devices = may_mix_devices(info.name);
  info.is_indexing = is_indexing(info.name);
  info.is_written.resize(info.arguments);
  for (size_t i = 0; i < info.arguments; ++i) {
    const auto& argument = schema.arguments()[i];
    info.is_written[i] = argument.alias_info() && argument.alias_info()->isWrite();
    if (argument.type()->str().find("Generator") != std::string::npos) {
      info.is_generator.resize(info.arguments);
      info.is_generator[i] = true;
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "npu: ", info.name,
                              " has no npu kernel, and no CPU kernel to fall back to. Register one with torch.library.impl(\"",
                              info.name, "\", \"npu\").");
  return info;
}

// Operators that were ever registered: what is known of one is in doubt when there are more, since a schema may lie where that of
// another was.
std::atomic<uint64_t> registrations{0};

struct Listener final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override { registrations.fetch_add(1, std::memory_order_relaxed); }
  void onOperatorDeregistered(const c10::OperatorHandle&) override {}
};

[[maybe_unused]] const auto* listening =
    new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));

struct Known {
  std::unique_ptr<OpInfo> info;
  uint64_t as_of = 0;
};

void renew(Known& known, const c10::OperatorHandle& op, uint64_t now) {
  auto info = std::make_unique<OpInfo>(inspect(op));
  known.as_of = now;
  if (known.info && *known.info == *info) return;
  known.info.release();  // leaked: a call of the old op may be under way on this thread
  known.info = std::move(info);
}

}  // namespace

const OpInfo& info_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, Known> known;
  Known& found = known[&op.schema()];
  const uint64_t now = registrations.load(std::memory_order_relaxed);
  if (C10_UNLIKELY(!found.info || found.as_of != now)) renew(found, op, now);
  if (C10_UNLIKELY(!computes())) found.info->has_shapes = has_shape_function(op);  // one may be registered at any time
  return *found.info;
}

bool has_own_out(const OpInfo& info) {
  return std::any_of(info.outs.begin(), info.outs.end(),
                     [](const auto& out) { return out.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1); });
}

}  // namespace npu
