#include "simulator/thread_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

#include "config/processors.h"

namespace npu::sim {
namespace {

// What is polled for before a thread sleeps. By the clock: a pause takes 23 ns on a Zen 5, and up to three times as long elsewhere.
constexpr std::chrono::microseconds kHelperPolls{100};  // longer than Python between the kernels of a prompt
constexpr std::chrono::microseconds kCallerPolls{50};
constexpr int64_t kPieces = 32;  // of a share at most: a thread that comes late or runs slowly holds up the others for so much of its own
constexpr int kPieceBits = 6;

thread_local bool inside_loop = false;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether it came true meanwhile.
template <class Condition>
bool poll_for(std::chrono::microseconds time, const Condition& is_true) {
  constexpr int kPausesOfLook = 16;  // at the clock
  if (is_true()) return true;
  const auto until = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < kPausesOfLook; ++i) {
      pause();
      if (is_true()) return true;
    }
  } while (std::chrono::steady_clock::now() < until);
  return false;
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

struct ThreadPool::Loop {
  uint64_t number;
  Body body;
  void* ctx;
  int64_t begin, end, grain;
  int shares, threads;  // as many shares as threads that are called, with the caller; of all threads

  int64_t grains() const { return (end - begin - 1) / grain + 1; }
  // The thread of a share: in proportion, so that a part of the weights belongs to the same node in loops with few shares and many.
  int place(int share) const { return shares == threads ? share : int(uint32_t(share) * uint32_t(threads) / uint32_t(shares)); }
};

// A thread's lines. Processors fetch lines in pairs: hence 128 bytes.
struct ThreadPool::Place {
  // What the thread is called to, in one line, which it alone polls. Who is late may read it while the next call is written: hence atomic.
  alignas(128) std::atomic<uint64_t> called{0};  // number of the loop that the line tells of
  std::atomic<uint64_t> written{0};              // number of the loop that is being written there, or was
  std::atomic<Body> body{nullptr};
  std::atomic<void*> ctx{nullptr};
  std::atomic<int64_t> begin{0}, end{0}, grain{1};
  std::atomic<uint64_t> shares{0};  // the thread's, of all, of threads: 16 bits each

  alignas(64) std::atomic<uint32_t> asleep{0};  // until somebody clears it

  // The thread writes here, and who takes pieces of its share.
  alignas(128) std::atomic<uint64_t> taken{0};  // number of the loop << kPieceBits, plus the pieces that are taken; it only grows
  std::atomic<uint32_t> state{kOutside};

  void call(const Loop& loop, int share) {
    constexpr auto release = std::memory_order_release;
    written.store(loop.number, std::memory_order_relaxed);
    body.store(loop.body, release);  // who reads this or what follows also reads the number above
    ctx.store(loop.ctx, release);
    begin.store(loop.begin, release);
    end.store(loop.end, release);
    grain.store(loop.grain, release);
    shares.store(uint64_t(share) | uint64_t(loop.shares) << 16 | uint64_t(loop.threads) << 32, release);
    called.store(loop.number, release);
  }
  // False: that loop is over.
  bool read_call(uint64_t number, Loop& loop, int& share) const {
    constexpr auto acquire = std::memory_order_acquire;
    const uint64_t of = shares.load(acquire);
    share = int(of & 0xffff);
    loop = {number, body.load(acquire), ctx.load(acquire), begin.load(acquire), end.load(acquire), grain.load(acquire),
            int(of >> 16 & 0xffff), int(of >> 32)};
    return written.load(std::memory_order_relaxed) == number;
  }

  bool has_pieces(uint64_t number, int64_t pieces) const {
    return taken.load(std::memory_order_acquire) < (number << kPieceBits) + uint64_t(pieces);
  }
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
    uint32_t seen = kOutside;
    poll_for(kCallerPolls, [&] { return !is_inside(seen = state.load(std::memory_order_acquire)); });
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
  Loop loop{0, body, ctx, begin, end, grain, 1, threads()};
  loop.shares = int(std::min<int64_t>(loop.threads, loop.grains()));
  if (loop.shares == 1 || inside_loop || !owner_.try_lock()) {
    body(ctx, begin, end);
    return;
  }
  std::lock_guard owned(owner_, std::adopt_lock);
  loop.number = ++number_;
  start_helpers(loop.place(loop.shares - 1));
  publish(loop);
  inside_loop = true;
  work(loop, 0);
  inside_loop = false;
  // All pieces are taken, and who took one was inside before that.
  for (int i = 1; i < loop.shares; ++i) places_[loop.place(i)].wait_until_left(loop.number);
}

// Its own share first, then what is left of the others'. A thread that only looks is not inside: nobody waits for it.
void ThreadPool::work(const Loop& loop, int share) noexcept {
  const Division of(loop.grains(), loop.shares);
  Place& mine = places_[loop.place(share)];
  for (int i = 0, other = share; i < loop.shares; ++i, other = other + 1 < loop.shares ? other + 1 : 0) {
    Place& owner = places_[loop.place(other)];
    const int64_t count = of.count(other), pieces = std::min(kPieces, count);
    if (!owner.has_pieces(loop.number, pieces)) continue;
    mine.enter(loop.number);
    const Division grains(count, pieces);
    for (int64_t piece; (piece = owner.take(loop.number, pieces)) >= 0;) {
      const int64_t from = loop.begin + (of.first(other) + grains.first(piece)) * loop.grain;
      loop.body(loop.ctx, from, std::min(from + grains.count(piece) * loop.grain, loop.end));
    }
    mine.leave();
  }
}

void ThreadPool::publish(const Loop& loop) {
  for (int i = 1; i < loop.shares; ++i) places_[loop.place(i)].call(loop, i);
  // A write: either it comes before that of a thread which goes to sleep, and the thread sees the call, or after, and is seen here.
  if (sleepers_.fetch_add(0, std::memory_order_acq_rel)) {
    wake(loop, 1);
    wake(loop, 2);
  }
}

void ThreadPool::help(int index) {
  inside_loop = true;
  Place& place = places_[index];
  Loop loop{};
  for (int share = 0, threads = 0;;) {
    const bool slept = wait_for_call(place, loop.number);
    if (!place.read_call(place.called.load(std::memory_order_acquire), loop, share)) continue;
    if (slept) {
      wake(loop, 2 * share + 1);
      wake(loop, 2 * share + 2);
    }
    if (loop.threads != threads) stay_beside_memory(index, threads = loop.threads);
    work(loop, share);
  }
}

// Returns whether it slept.
bool ThreadPool::wait_for_call(Place& place, uint64_t last) {
  auto is_called = [&] { return place.called.load(std::memory_order_acquire) != last; };
  for (bool slept = false;; slept = true) {
    if (poll_for(kHelperPolls, is_called)) return slept;
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
  if (share >= loop.shares) return;
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
