// The environment of the software NPU: every variable that C++ reads, read in one place.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <vector>

#include "simulator/faults.h"

namespace npu::sim {

// A variable has a value that cannot be used. The text names the variable, the value and the remedy.
struct ConfigError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class FallbackReport { silent, warn, error };

struct Config {
  std::vector<int> visible;  // NPU_VISIBLE_DEVICES: which of the NPU_SIMULATOR_DEVICES simulated devices, in order
  size_t memory_bytes;       // NPU_SIMULATOR_MEMORY: capacity of each device
  int threads;               // NPU_NUM_THREADS: size of the thread pool, the caller included
  FallbackReport fallback;   // NPU_FALLBACK
  bool check_memory;         // NPU_DEBUG: memory
  std::vector<Fault> faults; // NPU_DEBUG: the others
  bool huge_pages;           // NPU_HUGE_PAGES
};

// Parsed at first use, never at load. Throws ConfigError, and again at each call until the environment is mended.
const Config& config();

}  // namespace npu::sim
