#include "simulator/thread_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <thread>

namespace npu::sim {
namespace {

constexpr uint32_t kOpen = 1u << 31;
constexpr uint32_t kCallerSleeps = 1u << 30;
constexpr uint32_t kCount = kCallerSleeps - 1;
constexpr int kHelperPolls = 1500;  // about 50 us of pause instructions: the gap between the kernels of a decode step
constexpr int kCallerPolls = 500;
constexpr int64_t kChunksPerThread = 8;

thread_local bool inside_loop = false;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int how_many) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, how_many, nullptr, nullptr, 0);
}

}  // namespace

void ThreadPool::parallel_for(int64_t begin, int64_t end, int64_t grain, Body body, void* ctx) {
  if (begin >= end) return;
  const int64_t n = end - begin;
  grain = std::max<int64_t>(1, grain);
  const int threads = this->threads();
  if (threads == 1 || n <= grain || inside_loop || !owner_.try_lock()) {
    body(ctx, begin, end);
    return;
  }
  std::lock_guard owned(owner_, std::adopt_lock);
  start_helpers(threads - 1);
  body_ = body;
  ctx_ = ctx;
  end_ = end;
  chunk_ = std::max(grain, n / (threads * kChunksPerThread));
  next_.store(begin, std::memory_order_relaxed);
  publish();
  inside_loop = true;
  work();
  inside_loop = false;
  wait_for_helpers();
}

void ThreadPool::work() noexcept {
  for (;;) {
    const int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
    if (begin >= end_) return;
    body_(ctx_, begin, std::min(begin + chunk_, end_));
  }
}

void ThreadPool::publish() {
  members_.store(kOpen, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst)) futex_wake(epoch_, INT_MAX);
}

// Closes the loop and waits for the helpers which still work on a chunk; those which did not come are not waited for.
void ThreadPool::wait_for_helpers() {
  uint32_t seen = members_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  for (int i = 0; (seen & kCount) && i < kCallerPolls; ++i) {
    pause();
    seen = members_.load(std::memory_order_acquire);
  }
  while (seen & kCount) {
    if (seen & kCallerSleeps) {
      futex_wait(members_, seen);
      seen = members_.load(std::memory_order_acquire);
    } else if (members_.compare_exchange_weak(seen, seen | kCallerSleeps, std::memory_order_acq_rel)) {
      seen |= kCallerSleeps;
    }
  }
}

void ThreadPool::help(int index) {
  inside_loop = true;
  uint32_t done = 0;
  for (;;) {
    uint32_t epoch = epoch_.load(std::memory_order_acquire);
    for (int i = 0; epoch == done && i < kHelperPolls; ++i) {
      pause();
      epoch = epoch_.load(std::memory_order_acquire);
    }
    if (epoch == done) {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      if (epoch_.load(std::memory_order_seq_cst) == done) futex_wait(epoch_, done);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      continue;
    }
    done = epoch;
    if (index >= threads()) continue;
    uint32_t seen = members_.load(std::memory_order_acquire);
    while ((seen & kOpen) && !members_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) {
    }
    if (!(seen & kOpen)) continue;
    work();
    if (members_.fetch_sub(1, std::memory_order_acq_rel) == (kCallerSleeps | 1)) futex_wake(members_, 1);
  }
}

void ThreadPool::start_helpers(int helpers) {
  while (started_ < helpers) {
    const int index = ++started_;
    std::thread([this, index] { help(index); }).detach();
  }
}

void ThreadPool::set_threads(int threads) { threads_.store(std::max(1, threads), std::memory_order_relaxed); }

void ThreadPool::after_fork_in_child() {
  started_ = 0;
  members_.store(0);
  epoch_.store(0);
  sleepers_.store(0);
  owner_.unlock();
}

}  // namespace npu::sim
