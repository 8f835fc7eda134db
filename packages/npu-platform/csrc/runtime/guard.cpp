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

StreamName name_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }

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
  c10::DeviceCapability getDeviceCapability(Device) const override {
    c10::DeviceCapability capability;  // all dtypes; of those, npu tensors are never quantized
    auto& has = capability.capability_data.supported_scalar_types;
    has.has_QInt8 = has.has_QUInt8 = has.has_QInt32 = has.has_QUInt4x2 = has.has_QUInt2x4 = 0;
    return capability;
  }
  void synchronizeDevice(DeviceIndex device) const override {
    check_device(device);
    check_alive(device);
    refuse_during_capture("synchronize of the device");
    check(driver().device_synchronize(device));
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
  Stream getNewStream(Device device, int priority) const override {
    const DeviceIndex index = index_of(device);
    check_alive(index);
    int64_t id = 0;
    check(driver().stream_create(index, priority, &id));
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
    refuse_during_capture("query of a stream");
    int is_done = 0;
    check(driver().stream_query(stream.device_index(), stream.id(), &is_done));
    return is_done != 0;
  }
  bool isStreamCapturing(const Stream& stream) const override { return is_capturing(name_of(stream)); }
  void synchronizeStream(const Stream& stream) const override {
    check_alive(stream.device_index());
    refuse_during_capture("synchronize of a stream");
    check(driver().stream_synchronize(stream.device_index(), stream.id()));
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    check_alive(stream.device_index());
    if (!*event) *event = create_event();
    check(driver().event_record(static_cast<npu_event*>(*event), stream.device_index(), stream.id()));
    if (C10_UNLIKELY(is_capturing())) thread_state.capture->streams().record(*event, name_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    if (C10_UNLIKELY(is_capturing()) && !thread_state.capture->streams().wait(name_of(stream), event)) {
      refuse_during_capture("waiting for work outside of the capture");
    }
    check(driver().stream_wait_event(stream.device_index(), stream.id(), static_cast<npu_event*>(event)));
  }
  bool queryEvent(void* event) const override {
    refuse_during_capture("query of an event");
    int is_done = 1;
    if (event) check(driver().event_query(static_cast<npu_event*>(event), &is_done));
    return is_done != 0;
  }
  void synchronizeEvent(void* event) const override {
    refuse_during_capture("synchronize of an event");
    if (event) check(driver().event_synchronize(static_cast<npu_event*>(event)));
  }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    refuse_during_capture("time between events");
    double milliseconds = 0;
    check(driver().event_elapsed(static_cast<npu_event*>(start), static_cast<npu_event*>(end), &milliseconds));
    return milliseconds;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    if (C10_UNLIKELY(is_capturing())) thread_state.capture->streams().forget(event);
    driver().event_destroy(static_cast<npu_event*>(event));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace npu
