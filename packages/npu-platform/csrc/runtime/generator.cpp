#include "runtime/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

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
  // Pickling asks for an offset, and sets it again.
  void set_offset(uint64_t offset) override {
    TORCH_CHECK_NOT_IMPLEMENTED(offset == 0, "npu: a generator has no offset (Mersenne Twister) but 0, got ", offset,
                                "; use get_state() and set_state()");
  }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { cpu_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu_.unsafeGetGeneratorImpl()->get_state(); }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    TORCH_CHECK(state->device().type() == kNpu, "Expected a 'npu' device type for generator but found '", state->device().type(),
                "'; its state can be set by set_state(other.get_state())");
    cpu_ = static_cast<Generator*>(state.get())->cpu_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<Generator>(device_.index(), cpu_);
  }
  Generator* clone_impl() const override { return new Generator(device_.index(), cpu_.clone()); }

  at::Generator cpu_;
};

// Those of all devices that can be, made together: a fork has to know them all.
struct Defaults {
  Defaults() {
    hold_in_forks(mutex);
    for (size_t i = 0; i < generators.size(); ++i) generators[i] = at::make_generator<Generator>(c10::DeviceIndex(i));
  }

  std::mutex mutex;
  std::array<at::Generator, NPU_MAX_DEVICES> generators;
  std::vector<std::mutex*> held;  // while the process forks: those under which kernels draw
};

Defaults& defaults() {
  static auto* all = new Defaults;
  return *all;
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  if (device < 0) device = thread_state.device;
  check_device(device);
  return defaults().generators[size_t(device)];
}

at::Generator new_generator(c10::DeviceIndex device) {
  if (device >= 0) check_device(device);
  return at::make_generator<Generator>(device < 0 ? thread_state.device : device);
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu_;
}

void seed_all(uint64_t seed) {
  auto& all = defaults();
  std::lock_guard lock(all.mutex);
  for (at::Generator& generator : all.generators) generator.set_current_seed(seed);
}

void lock_default_generators() {
  auto& all = defaults();
  for (at::Generator& generator : all.generators) {
    generator.mutex().lock();  // of who seeds it
    std::mutex& drawing = cpu_generator_of(generator).mutex();
    if (std::find(all.held.begin(), all.held.end(), &drawing) != all.held.end()) continue;  // two may share a state
    drawing.lock();
    all.held.push_back(&drawing);
  }
}

void unlock_default_generators() {
  auto& all = defaults();
  for (std::mutex* drawing : all.held) drawing->unlock();
  all.held.clear();
  for (at::Generator& generator : all.generators) generator.mutex().unlock();
}

}  // namespace npu
