// Pages of a KV cache, copied between two memories for as long as there is time.
#pragma once

#include "dispatch/tiers.h"

namespace npu_ops {

constexpr int kPageStacks = 32;

struct PageAxis {
  int64_t number, device, host;  // how many, and the bytes between two on either side
};

// Layers at equal distances: a pair of addresses is where a block of the first layer begins.
struct PageStack {
  char* device;  // the memory
  PageAxis layers, fragments;
  int64_t bytes;           // of a row, the piece without gaps that a fragment of a layer is
  const int64_t* offsets;  // of the pairs: in the device's memory and in the host's, one pair after another
  int64_t rows;            // of all pairs
};

struct PagesParams {
  PageStack stacks[kPageStacks];
  int64_t num_stacks;
  char* host;
  int64_t* progress;  // rows that are done, of all stacks one after another; where to go on from, and how far it came
  int64_t first;      // of these stacks, among the rows that progress counts
  bool to_host;
  double seconds;  // no row is begun after them, but the first; infinity: all rows
};

NPU_KERNEL(copy_pages, PagesParams)

}  // namespace npu_ops
