// Faults on demand: which allocation, launch or transfer goes wrong, counted so that a run can be repeated.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "include/npu_driver.h"
#include "faults/watch.h"

namespace npu {

enum class FaultKind { out_of_memory, kernel, lost, bit_flip, slow, slow_link };

// One fault. It counts the events that match it (allocations for out_of_memory, transfers for slow_link, launches for the
// others) from when it is armed, and strikes the `times` of them that begin with the `at`-th.
struct Fault {
  FaultKind kind = FaultKind::kernel;
  std::string kernel;  // launches of this kernel alone, with or without the overload's name; empty: of any
  int device = -1;     // events on this device alone; -1: on any
  int64_t at = 1;
  int64_t times = 1;   // 0: all that follow
  uint64_t seed = 0;   // bit_flip: chooses the bit
  std::chrono::nanoseconds delay{0};  // slow, slow_link

  std::string text() const;  // as in NPU_DEBUG
};

// "oom@37", "kernel=npu_ops::linear@5", "lost@100:device=1", "bitflip@12:seed=7", "slow=2ms:kernel=aten::mm", "slow_link=200us".
// nullopt: not a fault.
std::optional<Fault> parse_fault(std::string_view text);

// A fault under way: what it has seen and done. Read and written under the mutex of Faults.
struct ArmedFault {
  explicit ArmedFault(Fault fault) : fault(std::move(fault)) {}

  const Fault fault;
  int64_t seen = 0;
  int64_t struck = 0;
  std::vector<std::string> history;  // what it did, delays excepted

  bool strikes();
  bool is_spent() const { return fault.times > 0 && struck >= fault.times; }
};

// The faults of this process. Thread-safe; asked only while is_watched().
class Faults {
 public:
  using Handle = std::shared_ptr<ArmedFault>;
  static Faults& instance();

  Handle arm(Fault fault);
  void disarm(const Handle& fault);
  void clear();
  int64_t struck(const ArmedFault& fault);
  std::vector<std::string> history(const ArmedFault& fault);
  void note(ArmedFault& fault, std::string what);

  // The fault that an allocation meets.
  std::optional<std::string> at_allocation(int device);

  struct Verdict {
    std::optional<std::string> failed;  // the kernel must not run: the fault
    Handle flip;                        // when the kernel has ended, the bit chosen by `random` is to change
    uint64_t random = 0;
    std::chrono::nanoseconds delay{0};
  };
  Verdict at_launch(int device, std::string_view kernel);
  std::chrono::nanoseconds at_transfer(int device);

  void lose(int device, std::string why);
  void reset(int device);
  std::optional<std::string> why_lost(int device);  // nullopt: the device works

  std::mutex& mutex() { return mutex_; }

 private:
  void update_watch();

  std::mutex mutex_;
  std::vector<Handle> armed_;
  std::array<std::optional<std::string>, NPU_MAX_DEVICES> lost_;
};

}  // namespace npu
