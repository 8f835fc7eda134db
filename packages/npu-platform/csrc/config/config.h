// The environment: every variable that C++ reads, read in one place, for the drivers that are built in and for the runtime.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "faults/faults.h"

namespace npu {

// A variable has a value that cannot be used. The text names the variable, the value and the remedy.
struct ConfigError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class FallbackReport { silent, warn, error };

enum class DriverKind { simulator, null, library };

// NPU_DEVICE: the driver, and what it is told.
struct DriverChoice {
  DriverKind kind = DriverKind::simulator;
  std::string path;     // of a library
  std::string options;  // what follows the first colon
};

// Alone, and read anew by each call, since it is asked for before devices are used. Throws ConfigError.
DriverChoice driver_choice();

struct Config {
  std::vector<int> visible;  // NPU_VISIBLE_DEVICES: which of the NPU_SIMULATOR_DEVICES devices, in order; a library reads it itself
  size_t memory_bytes;       // NPU_SIMULATOR_MEMORY: capacity of each device
  int threads;               // NPU_NUM_THREADS: size of the thread pool, the caller included
  FallbackReport fallback;   // NPU_FALLBACK
  bool check_memory;         // NPU_DEBUG: memory
  std::vector<Fault> faults; // NPU_DEBUG: the others
  bool huge_pages;           // NPU_HUGE_PAGES
};

// Parsed at first use, never at load. Throws ConfigError, and again at each call until the environment is mended.
const Config& config();

}  // namespace npu
