// What a kernel may use of its surroundings: threads and scratch memory. Plain C types, no torch, no standard library.
#pragma once

#include <cstddef>
#include <cstdint>

namespace npu_ops {

using Body = void (*)(void* context, int64_t begin, int64_t end);

struct Parallel {
  // body over [0, n) in dynamic chunks of grain items, on all threads; returns when all is done
  void (*run)(int64_t n, int64_t grain, Body body, void* context);
  int (*num_threads)();

  template <class Fn>
  void operator()(int64_t n, int64_t grain, const Fn& fn) const {
    if (n <= grain) {
      if (n > 0) fn(int64_t{0}, n);
      return;
    }
    run(n, grain, [](void* c, int64_t b, int64_t e) { (*static_cast<const Fn*>(c))(b, e); }, const_cast<Fn*>(&fn));
  }

  // Whether who takes an item of n takes the next one as well, as far as threads keep to equal shares.
  bool goes_on(int64_t item, int64_t n) const { return item + 1 < n && item * num_threads() / n == (item + 1) * num_threads() / n; }
};

// A buffer of this thread, aligned to 64 bytes, kept and grown from call to call. Its content is undefined. Where there is no memory for
// it, it throws what the op's caller gets as a RuntimeError, whichever thread of a parallel region asked.
// Slots let a kernel hold several at once; the caller of a parallel region uses slots of its own (>= kCallerSlots).
void* thread_scratch(int slot, size_t bytes);
constexpr int kCallerSlots = 8;
constexpr int kScratchSlots = 16;

}  // namespace npu_ops
