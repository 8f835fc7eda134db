#include "runtime/capture_streams.h"

#include <algorithm>

namespace npu {

void CaptureStreams::add_launch(StreamName stream) {
  const auto found = done_before_.find(stream);
  if (found != done_before_.end()) ++found->second[stream];
}

void CaptureStreams::record(const void* event, StreamName stream) {
  const auto found = done_before_.find(stream);
  if (found == done_before_.end()) {
    events_.erase(event);
  } else {
    events_[event] = found->second;
  }
}

bool CaptureStreams::wait(StreamName stream, const void* event) {
  const auto found = events_.find(event);
  if (found == events_.end()) return !contains(stream);
  Clock& clock = done_before_[stream];
  for (const auto& [other, launches] : found->second) clock[other] = std::max(clock[other], launches);
  return true;
}

std::optional<StreamName> CaptureStreams::find_unjoined() const {
  const Clock& joined = done_before_.at(origin_);
  for (const auto& [stream, clock] : done_before_) {
    const auto own = clock.find(stream);
    if (stream == origin_ || own == clock.end()) continue;
    const auto waited = joined.find(stream);
    if (waited == joined.end() || waited->second < own->second) return stream;
  }
  return std::nullopt;
}

}  // namespace npu
