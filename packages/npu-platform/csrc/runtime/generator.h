// Random numbers: an npu generator is a face of a CPU generator, from which the kernels draw.
#pragma once

#include <ATen/core/Generator.h>

namespace npu {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
at::Generator cpu_generator_of(const at::Generator& generator);

// Seeds the default generators of all devices, those included that are made later: torch.manual_seed() must not
// bring up devices.
void seed_all(uint64_t seed);

}  // namespace npu
