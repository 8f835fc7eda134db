// The streams of a capture: the one that it began on, and those that events fork from it and join to it again. Without
// torch, for the sanitizers.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>

namespace npu {

struct StreamName {
  int device = 0;
  int64_t id = 0;
  auto operator<=>(const StreamName&) const = default;
};

class CaptureStreams {
 public:
  explicit CaptureStreams(StreamName origin) : origin_(origin) { done_before_[origin]; }

  StreamName origin() const { return origin_; }
  bool contains(StreamName stream) const { return done_before_.contains(stream); }

  void add_launch(StreamName stream);
  void record(const void* event, StreamName stream);
  // The stream becomes one of the capture when the event is. False, and nothing changes, where the capture would depend on
  // work outside of it.
  [[nodiscard]] bool wait(StreamName stream, const void* event);
  void forget(const void* event) { events_.erase(event); }

  // A stream whose last launches the origin does not wait for.
  std::optional<StreamName> find_unjoined() const;

 private:
  using Clock = std::map<StreamName, uint64_t>;  // how many launches of each stream come before

  StreamName origin_;
  std::map<StreamName, Clock> done_before_;  // what each stream does next
  std::map<const void*, Clock> events_;      // those recorded on streams of the capture
};

}  // namespace npu
