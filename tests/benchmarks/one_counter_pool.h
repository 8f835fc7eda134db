// The pool that npu-platform had until November 2026, for comparison: all chunks of a loop come from one counter, and all threads enter
// and leave through one word.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <thread>

class OneCounterPool {
 public:
  using Body = void (*)(void* ctx, int64_t begin, int64_t end);

  explicit OneCounterPool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; ++i) std::thread([this] { help(); }).detach();
  }

  void parallel_for(int64_t begin, int64_t end, int64_t grain, Body body, void* ctx) {
    if (threads_ == 1 || end - begin <= grain) return body(ctx, begin, end);
    body_ = body;
    ctx_ = ctx;
    end_ = end;
    chunk_ = std::max(grain, (end - begin) / (threads_ * 8));
    next_.store(begin, std::memory_order_relaxed);
    members_.store(kOpen, std::memory_order_release);
    epoch_.fetch_add(1);
    if (sleepers_.load()) futex(epoch_, FUTEX_WAKE_PRIVATE, INT_MAX);
    work();
    wait_for_helpers();
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31, kCallerSleeps = 1u << 30, kCount = kCallerSleeps - 1;

  static void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
  }

  void work() {
    for (;;) {
      const int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
      if (begin >= end_) return;
      body_(ctx_, begin, std::min(begin + chunk_, end_));
    }
  }

  void wait_for_helpers() {
    uint32_t seen = members_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    for (int i = 0; (seen & kCount) && i < 500; ++i) {
      __builtin_ia32_pause();
      seen = members_.load(std::memory_order_acquire);
    }
    while (seen & kCount) {
      if (seen & kCallerSleeps) {
        futex(members_, FUTEX_WAIT_PRIVATE, seen);
        seen = members_.load(std::memory_order_acquire);
      } else if (members_.compare_exchange_weak(seen, seen | kCallerSleeps, std::memory_order_acq_rel)) {
        seen |= kCallerSleeps;
      }
    }
  }

  void help() {
    for (uint32_t done = 0;;) {
      uint32_t epoch = epoch_.load(std::memory_order_acquire);
      for (int i = 0; epoch == done && i < 1500; ++i) {
        __builtin_ia32_pause();
        epoch = epoch_.load(std::memory_order_acquire);
      }
      if (epoch == done) {
        sleepers_.fetch_add(1);
        if (epoch_.load() == done) futex(epoch_, FUTEX_WAIT_PRIVATE, done);
        sleepers_.fetch_sub(1);
        continue;
      }
      done = epoch;
      uint32_t seen = members_.load(std::memory_order_acquire);
      while ((seen & kOpen) && !members_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) {
      }
      if (!(seen & kOpen)) continue;
      work();
      if (members_.fetch_sub(1, std::memory_order_acq_rel) == (kCallerSleeps | 1)) futex(members_, FUTEX_WAKE_PRIVATE, 1);
    }
  }

  const int threads_;
  Body body_ = nullptr;
  void* ctx_ = nullptr;
  int64_t end_ = 0, chunk_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> members_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> sleepers_{0};
};
