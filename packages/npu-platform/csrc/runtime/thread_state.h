// What a thread is doing on the device right now: its current device and streams, the kernel it is in, the graph it captures.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "include/npu_driver.h"

namespace npu {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;

using PoolId = uint64_t;
constexpr PoolId kDefaultPool = 0;

class Recording;

// The allocations that one op made while it was captured, in order. A replay lends it the same addresses again.
struct AllocationLog {
  struct Entry {
    void* address;
    size_t bytes;
  };
  std::vector<Entry> entries;
};

// Where an entry of a log is in a replay: lent once, and free for entries that lie on it when it is given back.
enum class Lent : uint8_t { no, in_use, given_back };

struct ThreadState {
  int kernel_depth = 0;  // > 0: inside a kernel, where the CPU allocator is the device's memory
  c10::DeviceIndex device = 0;
  PoolId pool = kDefaultPool;          // where allocations come from
  Recording* capture = nullptr;        // the graph under capture
  AllocationLog* record = nullptr;     // capture: the log of the op under way
  const AllocationLog* lend = nullptr; // replay: the log whose addresses are handed out
  std::vector<Lent>* lent = nullptr;   // replay: which of its entries are
  const std::set<std::string, std::less<>>* skipped = nullptr;  // kernels that are launched but do not run
  std::array<int64_t, NPU_MAX_DEVICES> stream{};
};

// initial-exec: read at each allocation of the process, so it must not cost a call.
extern thread_local ThreadState thread_state __attribute__((tls_model("initial-exec")));

}  // namespace npu
