// Devices, streams and events as c10 knows them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "runtime/device.h"
#include "runtime/faults.h"
#include "runtime/graph.h"

namespace npu {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }

  Device exchangeDevice(Device device) const override {
    const Device previous = getDevice();
    if (device.index() != previous.index()) setDevice(device);
    return previous;
  }
  Device getDevice() const override { return Device(kNpu, thread_state.device); }
  void setDevice(Device device) const override {
    check_device(device.index());
    thread_state.device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { thread_state.device = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count_or_zero()); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  void synchronizeDevice(DeviceIndex device) const override {
    check_alive(device);
    refuse_during_capture("synchronize of the device");
  }

  Stream getStream(Device device) const override {
    const DeviceIndex index = index_of(device);
    return Stream(Stream::UNSAFE, Device(kNpu, index), thread_state.stream[size_t(index)]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(kNpu, index_of(device)), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }
  Stream getNewStream(Device device, int) const override {
    const DeviceIndex index = index_of(device);
    check_alive(index);
    int64_t id = 0;
    check(npu_stream_create(index, &id));
    return Stream(Stream::UNSAFE, Device(kNpu, index), id);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream previous = getStream(stream.device());
    thread_state.stream[size_t(stream.device_index())] = stream.id();
    return previous;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream& stream) const override {
    check_alive(stream.device_index());
    return true;
  }
  bool isStreamCapturing(const Stream&) const override { return is_capturing(); }
  void synchronizeStream(const Stream& stream) const override {
    check_alive(stream.device_index());
    refuse_during_capture("synchronize of a stream");
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    check_alive(stream.device_index());
    if (!*event) {
      npu_event* created = nullptr;
      check(npu_event_create(&created));
      *event = created;
    }
    check(npu_event_record(static_cast<npu_event*>(*event), stream.id()));
  }
  void block(void*, const Stream&) const override {}  // what was submitted before the event is done already
  bool queryEvent(void* event) const override { return !event || npu_event_query(static_cast<npu_event*>(event)); }
  void synchronizeEvent(void*) const override { refuse_during_capture("synchronize of an event"); }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    double milliseconds = 0;
    check(npu_event_elapsed(static_cast<npu_event*>(start), static_cast<npu_event*>(end), &milliseconds));
    return milliseconds;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { npu_event_destroy(static_cast<npu_event*>(event)); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace npu
