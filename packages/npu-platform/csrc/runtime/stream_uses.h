// Memory that streams still use when its owner gives it up: it is handed out again once their work is done.
#pragma once

#include <unordered_map>
#include <utility>
#include <vector>

#include "include/npu_driver.h"
#include "runtime/capture_streams.h"

namespace npu {

// Not thread-safe: an allocator asks under its own lock.
class StreamUses {
 public:
  // Work on the stream uses the block at this address, which is not given up yet.
  void note(void* address, StreamName stream);

  // The block is given up. False: no stream uses it. Otherwise take_done() has it when what its streams were given until now is done.
  bool defer(void* address) { return !noted_.empty() && defer_noted(address); }

  bool has_deferred() const { return !deferred_.empty(); }
  std::vector<void*> take_done();
  void wait() const;  // until take_done() has all blocks that were given up

 private:
  using Events = std::vector<npu_event*>;

  bool defer_noted(void* address);

  std::unordered_map<void*, std::vector<StreamName>> noted_;
  std::vector<std::pair<void*, Events>> deferred_;
};

}  // namespace npu
