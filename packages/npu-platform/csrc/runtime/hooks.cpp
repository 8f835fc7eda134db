// What PyTorch asks of an accelerator by name rather than by tensor.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "runtime/caching_allocator.h"
#include "runtime/device.h"
#include "runtime/generator.h"
#include "runtime/host_allocator.h"
#include "runtime/resize.h"

namespace npu {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { device_count(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count_or_zero() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    check_device(device);
    return true;
  }

  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return thread_state.device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check_device(device);
    thread_state.device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex previous = thread_state.device;
    setCurrentDevice(device);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? thread_state.device : exchangeDevice(device);
  }

  at::Allocator* getPinnedMemoryAllocator() const override { return host_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Device getDeviceFromPtr(void* address) const override {
    const c10::DeviceIndex device = device_of(address);
    TORCH_CHECK(device >= 0, "npu: not an address of device memory");
    return {kNpu, device};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes, "resize_");
  }
};

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace npu
