// Random numbers: an npu generator is a face of a CPU generator, from which the kernels draw.
#pragma once

#include <ATen/core/Generator.h>

namespace npu {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
at::Generator cpu_generator_of(const at::Generator& generator);

// Seeds the default generators of all devices that can be: torch.manual_seed() must not bring up devices.
void seed_all(uint64_t seed);

// While the process forks. A kernel that draws from a generator allocates, so these locks come before those of memory.
void lock_default_generators();
void unlock_default_generators();

}  // namespace npu
