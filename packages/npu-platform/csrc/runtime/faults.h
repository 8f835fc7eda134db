// Faults on demand (faults/) as the errors that PyTorch raises.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <string>

#include "faults/faults.h"

namespace npu {

// Raises torch.AcceleratorError when the device is lost.
void check_alive(c10::DeviceIndex device);

// What a launch meets while is_watched(): raises torch.AcceleratorError for a kernel that fails or a lost device, waits where
// it is slow. A bit that is to flip when the kernel has ended is in the result.
struct PendingFlip {
  Faults::Handle fault;  // null: none
  uint64_t random = 0;
};
PendingFlip meet_launch_faults(c10::DeviceIndex device, const char* kernel);
void flip_bit(c10::DeviceIndex device, const char* kernel, const PendingFlip& flip) noexcept;

// A transfer between host and device, or between devices.
void meet_transfer_faults(c10::DeviceIndex device);

// Raises as above, or returns the fault by which this allocation is out of memory.
std::optional<std::string> meet_allocation_faults(c10::DeviceIndex device);

// Memory that this thread made or wrote last: where a bit flips.
void note_allocation(void* address);
void note_result(void* address, size_t bytes);

void reset_device(c10::DeviceIndex device);  // it works again; its memory reads as zero

}  // namespace npu
