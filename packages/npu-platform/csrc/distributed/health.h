// Whether a group can still be used. Its first failed collective ends it: the ranks no longer agree on what comes next.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <string>

namespace npu {

class Health {
 public:
  Health(int rank, int size) : rank_(rank), size_(size) {}

  // Raises DistBackendError when the group has failed before.
  void check(const char* collective) const {
    if (C10_LIKELY(!failed_.load(std::memory_order_acquire))) return;
    std::lock_guard lock(mutex_);
    raise(collective, "this group can no longer be used: " + reason_);
  }

  // Ends the group and raises DistBackendError with the reason.
  [[noreturn]] void fail(const char* collective, const std::string& reason) {
    close(std::string("its ") + collective + " failed (" + reason + ")");
    raise(collective, reason + ". This group can no longer be used: end all its ranks and start them again");
  }

  // Ends the group; only the first reason is kept.
  void close(const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (failed_.load()) return;
    reason_ = reason;
    failed_.store(true, std::memory_order_release);
  }

 private:
  [[noreturn]] void raise(const char* collective, const std::string& what) const {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("npuccl: ", collective, " on rank ", rank_, " of ", size_, ": ", what, "."));
  }

  const int rank_, size_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::string reason_;
};

}  // namespace npu
