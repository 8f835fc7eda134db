// The body of launch_on_aliases().
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <tuple>
#include <type_traits>

#include "aten/alias.h"
#include "runtime/device.h"

namespace npu {
namespace detail {

// While an op is captured its allocations are logged.
class RecordScope {
 public:
  explicit RecordScope(AllocationLog* log) : previous_(std::exchange(thread_state.record, log)) {}
  ~RecordScope() { thread_state.record = previous_; }
  RecordScope(const RecordScope&) = delete;
  RecordScope& operator=(const RecordScope&) = delete;

 private:
  AllocationLog* previous_;
};

template <class Visit>
void for_each_result(at::Tensor& result, Visit visit) {
  visit(result);
}

template <class... Results, class Visit>
void for_each_result(std::tuple<Results...>& results, Visit visit) {
  std::apply([&](auto&... each) { (visit(each), ...); }, results);
}

// Outside any kernel, as far as the allocators can tell: for shape functions.
class HostScope {
 public:
  HostScope() : previous_(std::exchange(thread_state.kernel_depth, 0)) {}
  ~HostScope() { thread_state.kernel_depth = previous_; }
  HostScope(const HostScope&) = delete;
  HostScope& operator=(const HostScope&) = delete;

 private:
  int previous_;
};

// Submits a kernel whose results decide shapes: where the driver does not compute, it runs here, on aliases of shapes, and
// the driver is given a launch of that name alone.
template <class Kernel>
void submit_for_shapes(c10::DeviceIndex device, const char* name, Kernel& kernel) {
  if (C10_LIKELY(computes())) return submit(device, name, kernel);
  {
    const HostScope host;
    kernel();
  }
  auto nothing = [] {};
  submit(device, name, nothing);
}

template <class Kernel>
class AliasKernelNode final : public AliasNode {
 public:
  AliasKernelNode(c10::DeviceIndex device, const char* name, AliasedTensors aliases, Kernel kernel)
      : AliasNode(device, name), aliases_(std::move(aliases)), kernel_(std::move(kernel)) {}

  auto call() { return kernel_(aliases_); }

 protected:
  void run_kernel(std::vector<at::Tensor>* results) override {
    auto all = kernel_(aliases_);
    for_each_result(all, [&](at::Tensor& each) { results->push_back(std::move(each)); });
  }

 private:
  AliasedTensors aliases_;
  Kernel kernel_;
};

}  // namespace detail

template <class Kernel>
auto launch_on_aliases(const char* name, AliasedTensors arguments, Kernel kernel, Devices devices) {
  Aliases aliases(computes() ? Aliases::Kind::memory : Aliases::Kind::shapes);
  for (at::Tensor& argument : arguments) argument = aliases.of(argument);
  if (devices == Devices::one) aliases.check_one_device(name);
  const c10::DeviceIndex device = aliases.device().value_or(thread_state.device);
  std::unique_ptr<detail::AliasKernelNode<Kernel>> node;
  if (C10_UNLIKELY(is_capturing())) {
    node = std::make_unique<detail::AliasKernelNode<Kernel>>(device, name, arguments, kernel);
  }
  KernelScope inside(device, name);
  at::AutoDispatchBelowADInplaceOrView below;
  std::optional<decltype(kernel(arguments))> made;
  {
    detail::RecordScope recording(node ? &node->log : thread_state.record);
    auto call = [&] { made.emplace(kernel(arguments)); };
    detail::submit_for_shapes(device, name, call);
  }
  auto& results = *made;
  arguments.clear();
  detail::for_each_result(results, [&](at::Tensor& each) {
    each = aliases.to_npu(std::move(each));
    if (node) node->expect(each);
    note_result_of_kernel(each);
  });
  if (C10_UNLIKELY(node != nullptr)) record_node(std::move(node));
  return std::move(results);
}

}  // namespace npu
