// Rows of a batch that are no tokens: a graph is captured for so many rows, and the batches that replay it often have fewer.
#pragma once

#include <cstdint>

namespace npu_ops {

struct Padding {
  int64_t rows = 0;    // of the batch
  int64_t tokens = 0;  // of them; the others follow, and nobody reads what comes of them

  // Of n rows those that are to be computed: the tokens, where the rows are the batch's.
  constexpr int64_t without(int64_t n) const { return n == rows ? tokens : n; }
};

// Leaves out the rows of a call that are padding. The header of a kernel that goes by tokens tells it of its own parameters; other calls
// compute all rows, as they do where nothing is known of padding.
template <class Params>
constexpr void leave_out(Params&, const Padding&) {}

}  // namespace npu_ops
