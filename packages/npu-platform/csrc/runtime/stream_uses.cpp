#include "runtime/stream_uses.h"

#include <algorithm>

#include "runtime/driver.h"

namespace npu {
namespace {

// A stream that can record nothing, as of a lost device, does no more work.
npu_event* record(StreamName stream) {
  npu_event* event = nullptr;
  if (driver().event_create(&event) != NPU_OK || !event) return nullptr;
  if (driver().event_record(event, stream.device, stream.id) == NPU_OK) return event;
  driver().event_destroy(event);
  return nullptr;
}

bool is_done(npu_event* event) {
  int done = 1;
  return driver().event_query(event, &done) != NPU_OK || done;
}

}  // namespace

void StreamUses::note(void* address, StreamName stream) {
  auto& streams = noted_[address];
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

bool StreamUses::defer_noted(void* address) {
  const auto found = noted_.find(address);
  if (found == noted_.end()) return false;
  Events events;
  for (const StreamName stream : found->second) {
    if (npu_event* event = record(stream)) events.push_back(event);
  }
  noted_.erase(found);
  deferred_.emplace_back(address, std::move(events));
  return true;
}

std::vector<void*> StreamUses::take_done() {
  std::vector<void*> done;
  std::erase_if(deferred_, [&](auto& block) {
    auto& [address, events] = block;
    if (!std::all_of(events.begin(), events.end(), is_done)) return false;
    for (npu_event* event : events) driver().event_destroy(event);
    done.push_back(address);
    return true;
  });
  return done;
}

void StreamUses::wait() const {
  for (const auto& [address, events] : deferred_) {
    for (npu_event* event : events) check(driver().event_synchronize(event));
  }
}

}  // namespace npu
