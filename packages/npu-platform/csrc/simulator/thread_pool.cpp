#include "simulator/thread_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

#include "config/processors.h"

namespace npu::sim {
namespace {

constexpr int kHelperPolls = 1500;  // 50 to 100 us of pause instructions: the gap between the kernels of a decode step
constexpr int kCallerPolls = 500;
constexpr int64_t kPieces = 8;  // of a share at most: a thread that comes late or runs slowly holds up the others for an eighth of its own
constexpr int kPieceBits = 4;

thread_local bool inside_loop = false;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

// What Place::state says of a thread: the loop that it is inside, if any, and whether the caller sleeps until it leaves.
constexpr uint32_t kOutside = 0, kCallerSleeps = 1, kInside = 2;
uint32_t inside(uint64_t number) { return uint32_t(number) << 2 | kInside; }

// Things divided among `parts`, who have the same but for one.
struct Division {
  int64_t each, more;
  Division(int64_t count, int64_t parts) : each(count / parts), more(count % parts) {}
  int64_t first(int64_t part) const { return part * each + std::min(part, more); }
  int64_t count(int64_t part) const { return each + (part < more); }
};

}  // namespace

// A thread's lines. Processors fetch lines in pairs: hence twice 64 bytes.
struct ThreadPool::Place {
  // The caller of a loop writes here, and the thread alone polls.
  alignas(128) std::atomic<uint64_t> called{0};  // to the loop of that number
  std::atomic<int> share{0};                     // of that loop
  std::atomic<uint32_t> asleep{0};               // until somebody clears it
  // The thread writes here, and who takes pieces of its share.
  alignas(128) std::atomic<uint64_t> taken{0};  // number of the loop << kPieceBits, plus the pieces that are taken; it only grows
  std::atomic<uint32_t> state{kOutside};

  // The next piece of `pieces`, or -1: all are taken, or that loop is over.
  int64_t take(uint64_t number, int64_t pieces) {
    const uint64_t none = number << kPieceBits, all = none + uint64_t(pieces);
    uint64_t seen = taken.load(std::memory_order_acquire);
    while (seen < all) {
      const uint64_t before = std::max(seen, none);
      if (taken.compare_exchange_weak(seen, before + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        return int64_t(before - none);
      }
    }
    return -1;
  }

  void enter(uint64_t number) { state.store(inside(number), std::memory_order_relaxed); }
  void leave() {
    if (state.exchange(kOutside, std::memory_order_acq_rel) & kCallerSleeps) futex_wake(state);
  }
  // Returns when the thread is not, or no longer, inside that loop.
  void wait_until_left(uint64_t number) {
    auto is_inside = [number](uint32_t seen) { return (seen & ~kCallerSleeps) == inside(number); };
    uint32_t seen = state.load(std::memory_order_acquire);
    for (int i = 0; is_inside(seen) && i < kCallerPolls; ++i) {
      pause();
      seen = state.load(std::memory_order_acquire);
    }
    while (is_inside(seen)) {
      if (seen & kCallerSleeps) {
        futex_wait(state, seen);
        seen = state.load(std::memory_order_acquire);
      } else if (state.compare_exchange_weak(seen, seen | kCallerSleeps, std::memory_order_acq_rel)) {
        seen |= kCallerSleeps;
      }
    }
  }
};

struct ThreadPool::Loop {
  uint64_t number;
  Body body;
  void* ctx;
  int64_t begin, end, grain, grains;
  uint32_t shares, threads;  // as many shares as threads that are called, with the caller; of all threads

  // The thread of a share: in proportion, so that a part of the weights belongs to the same node in loops with few shares and many.
  int place(int share) const { return int(shares == threads ? uint32_t(share) : uint32_t(share) * threads / shares); }

  // The pieces of [first, first + count) grains that `owner` has not given away yet.
  void run(Place& owner, int64_t first, int64_t count) const {
    const int64_t pieces = std::min(kPieces, count);
    int64_t piece = owner.take(number, pieces);
    if (piece < 0) return;
    const Division of(count, pieces);
    do {
      const int64_t from = begin + (first + of.first(piece)) * grain;
      body(ctx, from, std::min(from + of.count(piece) * grain, end));
    } while ((piece = owner.take(number, pieces)) >= 0);
  }
};

ThreadPool::ThreadPool(int threads, std::vector<std::vector<int>> nodes)
    : threads_(std::clamp(threads, 1, kMostThreads)),
      places_(static_cast<Place*>(std::aligned_alloc(alignof(Place), kMostThreads * sizeof(Place)))),
      nodes_(std::move(nodes)) {
  if (!places_) throw std::bad_alloc();
  new (&places_[0]) Place;
}

void ThreadPool::parallel_for(int64_t begin, int64_t end, int64_t grain, Body body, void* ctx) {
  if (begin >= end) return;
  grain = std::max<int64_t>(1, grain);
  const int64_t grains = (end - begin - 1) / grain + 1;
  const int threads = this->threads(), shares = int(std::min<int64_t>(threads, grains));
  if (shares == 1 || inside_loop || !owner_.try_lock()) {
    body(ctx, begin, end);
    return;
  }
  std::lock_guard owned(owner_, std::adopt_lock);
  const Loop loop{number_.load(std::memory_order_relaxed) + 1, body, ctx, begin, end, grain, grains, uint32_t(shares), uint32_t(threads)};
  start_helpers(loop.place(shares - 1));
  publish(loop);
  inside_loop = true;
  work(loop, 0);
  inside_loop = false;
  // All pieces are taken, and who took one was inside before that.
  for (int i = 1; i < shares; ++i) places_[loop.place(i)].wait_until_left(loop.number);
}

// Its own share first, then what is left of the others'.
void ThreadPool::work(const Loop& loop, int share) noexcept {
  const Division of(loop.grains, loop.shares);
  const int shares = int(loop.shares);
  for (int i = share; i < shares; ++i) loop.run(places_[loop.place(i)], of.first(i), of.count(i));
  for (int i = 0; i < share; ++i) loop.run(places_[loop.place(i)], of.first(i), of.count(i));
}

// The number before the rest: who reads any of it cannot take it for an earlier loop's.
void ThreadPool::publish(const Loop& loop) {
  constexpr auto release = std::memory_order_release;
  number_.store(loop.number, std::memory_order_relaxed);
  body_.store(loop.body, release);
  ctx_.store(loop.ctx, release);
  begin_.store(loop.begin, release);
  end_.store(loop.end, release);
  grain_.store(loop.grain, release);
  grains_.store(loop.grains, release);
  shares_of_threads_.store(uint64_t(loop.shares) << 32 | loop.threads, release);
  for (int i = 1; i < int(loop.shares); ++i) {
    Place& place = places_[loop.place(i)];
    place.share.store(i, release);
    place.called.store(loop.number, release);
  }
  // A write: either it comes before that of a thread which goes to sleep, and the thread sees the call, or after, and is seen here.
  if (sleepers_.fetch_add(0, std::memory_order_acq_rel)) {
    wake(loop, 1);
    wake(loop, 2);
  }
}

// Nothing when that loop is over.
std::optional<ThreadPool::Loop> ThreadPool::loop_of(uint64_t number) const {
  constexpr auto acquire = std::memory_order_acquire;
  const uint64_t shares = shares_of_threads_.load(acquire);
  const Loop loop{number, body_.load(acquire), ctx_.load(acquire), begin_.load(acquire), end_.load(acquire), grain_.load(acquire),
                  grains_.load(acquire), uint32_t(shares >> 32), uint32_t(shares)};
  return number_.load(std::memory_order_relaxed) == number ? std::optional(loop) : std::nullopt;
}

void ThreadPool::help(int index) {
  inside_loop = true;
  Place& place = places_[index];
  uint32_t threads = 0;
  for (uint64_t last = 0;;) {
    const bool slept = wait_for_call(place, last);
    last = place.called.load(std::memory_order_acquire);
    place.enter(last);
    const int share = place.share.load(std::memory_order_acquire);
    if (const auto loop = loop_of(last)) {
      if (slept) {
        wake(*loop, 2 * share + 1);
        wake(*loop, 2 * share + 2);
      }
      if (loop->threads != threads) stay_beside_memory(index, int(threads = loop->threads));
      work(*loop, share);
    }
    place.leave();
  }
}

// Returns whether it slept.
bool ThreadPool::wait_for_call(Place& place, uint64_t last) {
  auto is_called = [&] { return place.called.load(std::memory_order_acquire) != last; };
  for (bool slept = false;; slept = true) {
    for (int i = 0; i < kHelperPolls; ++i) {
      if (is_called()) return slept;
      pause();
    }
    place.asleep.store(1, std::memory_order_relaxed);
    sleepers_.fetch_add(1, std::memory_order_acq_rel);
    if (is_called() && place.asleep.exchange(0, std::memory_order_acq_rel)) {
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
      return slept;
    }
    while (place.asleep.load(std::memory_order_acquire)) futex_wait(place.asleep, 1);
  }
}

// Threads are woken as a tree: share 0 wakes 1 and 2, and who is woken wakes 2 i + 1 and 2 i + 2. Those below one that is awake are left to
// its waker.
void ThreadPool::wake(const Loop& loop, int share) {
  if (share >= int(loop.shares)) return;
  std::atomic<uint32_t>& asleep = places_[loop.place(share)].asleep;
  if (asleep.load(std::memory_order_relaxed) && asleep.exchange(0, std::memory_order_acq_rel)) {
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    futex_wake(asleep);
    return;
  }
  wake(loop, 2 * share + 1);
  wake(loop, 2 * share + 2);
}

void ThreadPool::stay_beside_memory(int index, int threads) const {
  if (nodes_.size() < 2) return;
  int64_t processors = 0;
  for (const auto& node : nodes_) processors += int64_t(node.size());
  int64_t its = index * processors / threads;
  for (const auto& node : nodes_) {
    if (its < int64_t(node.size())) {
      stay_on(node);  // refused, it runs wherever the system sends it
      return;
    }
    its -= int64_t(node.size());
  }
}

void ThreadPool::start_helpers(int helpers) {
  while (started_ < helpers) {
    const int index = started_ + 1;
    new (&places_[index]) Place;
    std::thread([this, index] { help(index); }).detach();
    started_ = index;
  }
}

void ThreadPool::set_threads(int threads) { threads_.store(std::clamp(threads, 1, kMostThreads), std::memory_order_relaxed); }

void ThreadPool::after_fork_in_child() {
  started_ = 0;
  sleepers_.store(0);
  owner_.unlock();
}

}  // namespace npu::sim
