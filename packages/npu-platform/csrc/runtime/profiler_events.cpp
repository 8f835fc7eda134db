// Method: the stubs by which torch.autograd.profiler times ops without Kineto, as use_device="npu" has it: an event before
// and one after each op.
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include "runtime/device.h"

namespace npu {
namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

npu_event* event_of(const ProfilerVoidEventStub* stub) { return static_cast<npu_event*>(stub->get()); }

struct ProfilerEvents final : torch::profiler::impl::ProfilerStubs {
  bool enabled() const override { return true; }

  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    const c10::DeviceIndex current = thread_state.device;
    npu_event* made = create_event();
    *event = ProfilerVoidEventStub(made, [](void* each) { npu::driver().event_destroy(static_cast<npu_event*>(each)); });
    if (device) *device = current;
    if (cpu_ns) *cpu_ns = c10::getTime();
    check(driver().event_record(made, current, thread_state.stream[size_t(current)]));
  }

  // Microseconds, as PyTorch's stubs for other devices have it.
  float elapsed(const ProfilerVoidEventStub* begin, const ProfilerVoidEventStub* end) const override {
    for (const auto* each : {begin, end}) check(driver().event_synchronize(event_of(each)));
    double milliseconds = 0;
    check(driver().event_elapsed(event_of(begin), event_of(end), &milliseconds));
    return float(milliseconds * 1000);
  }

  void onEachDevice(std::function<void(int)> visit) const override {
    for (int i = 0; i < device_count(); ++i) visit(i);
  }
  void synchronize() const override {
    for (int i = 0; i < device_count(); ++i) check(driver().device_synchronize(i));
  }

  // Ranges and marks are for tools that the device has none of.
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
};

ProfilerEvents events;
const bool registered = (torch::profiler::impl::registerPrivateUse1Methods(&events), true);

}  // namespace
}  // namespace npu
