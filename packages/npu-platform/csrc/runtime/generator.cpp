#include "runtime/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <mutex>
#include <optional>

#include "runtime/device.h"
#include "runtime/forks.h"

namespace npu {
namespace {

// State, seeds and the numbers drawn are those of the CPU generator: the same seed gives the same values on both, but for
// those that aten/random.cpp makes by itself.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device, at::Generator cpu = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(kNpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  static c10::DeviceType device_type() { return kNpu; }
  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return cpu_.seed(); }
  void set_offset(uint64_t) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "npu: a generator has no offset (Mersenne Twister); use get_state() and set_state()");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "npu: a generator has no offset (Mersenne Twister); use get_state() and set_state()");
  }
  void set_state(const c10::TensorImpl& state) override { cpu_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu_.unsafeGetGeneratorImpl()->get_state(); }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    cpu_ = static_cast<Generator*>(state.get())->cpu_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<Generator>(device_.index(), cpu_);
  }
  Generator* clone_impl() const override { return new Generator(device_.index(), cpu_.clone()); }

  at::Generator cpu_;
};

struct Defaults {
  Defaults() { hold_in_forks(mutex); }

  std::mutex mutex;
  std::array<std::optional<at::Generator>, NPU_MAX_DEVICES> generators;
  uint64_t seed = c10::default_rng_seed_val;
};

Defaults& defaults() {
  static auto* all = new Defaults;
  return *all;
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  if (device < 0) device = thread_state.device;
  check_device(device);
  auto& all = defaults();
  std::lock_guard lock(all.mutex);
  auto& entry = all.generators[size_t(device)];
  if (!entry) {
    entry = new_generator(device);
    entry->set_current_seed(all.seed);
  }
  return *entry;
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? thread_state.device : device);
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu_;
}

void seed_all(uint64_t seed) {
  auto& all = defaults();
  std::lock_guard lock(all.mutex);
  all.seed = seed;
  for (auto& entry : all.generators) {
    if (entry) entry->set_current_seed(seed);
  }
}

}  // namespace npu
