// The simulated devices of this process, made at first use and never destroyed.
#pragma once

#include <memory>
#include <vector>

#include "config/config.h"
#include "simulator/memory.h"
#include "simulator/thread_pool.h"

namespace npu::sim {

class Devices {
 public:
  static Devices& instance();                 // throws ConfigError
  static Devices* if_created();               // nullptr before the first use

  int count() const { return int(memory_.size()); }
  DeviceMemory& memory(int device) { return *memory_[size_t(device)]; }
  ThreadPool& pool() { return pool_; }
  int owner_of(const void* address) const;    // the ordinal, or -1

 private:
  explicit Devices(const Config& config);

  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  ThreadPool pool_;
};

}  // namespace npu::sim
