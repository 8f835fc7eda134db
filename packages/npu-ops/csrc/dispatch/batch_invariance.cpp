#include "dispatch/batch_invariance.h"

#include <atomic>

namespace npu_ops {
namespace {

std::atomic<bool> invariant{false};

}  // namespace

bool batch_invariant() { return invariant.load(std::memory_order_relaxed); }
void set_batch_invariant(bool on) { invariant = on; }

}  // namespace npu_ops
