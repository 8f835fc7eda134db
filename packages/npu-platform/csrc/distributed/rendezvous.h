// How the ranks of a group find out that they share a host, and come by memory that they share.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "distributed/shared_segment.h"

namespace npu {

struct Rendezvous {
  std::unique_ptr<SharedSegment> segment;  // null on all ranks or on none
  std::string refusal;                     // why it is null
  std::vector<std::string> hosts;          // of each rank, as all have told
};

// All ranks of the group call this with their store and what identifies their host ("" when nothing does). Blocks until
// all have, or raises with the store's timeout.
Rendezvous share_memory(c10d::Store& store, int rank, int size, const std::string& host);

// Whether all ranks say yes to what `topic` is about; all of them call this.
bool agreed(c10d::Store& store, const std::string& topic, int rank, int size, bool own);

}  // namespace npu
