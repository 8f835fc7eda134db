// The device's cores: loops shared out over a few threads, on a machine that may belong to others as well.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace npu::sim {

// Opportunistic chunks: the caller works through the loop itself; helper threads take chunks as long as they run. When a
// neighbour has taken a core, its helper simply takes fewer chunks, and nobody spins for it: a helper polls for work for
// some microseconds after a loop and then sleeps in the kernel. (OpenMP's spinning barrier was 10x slower there.)
class ThreadPool {
 public:
  using Body = void (*)(void* ctx, int64_t begin, int64_t end);

  explicit ThreadPool(int threads) : threads_(threads) {}

  // Runs body, which must not throw, over [begin, end) in chunks of at least grain. A nested or concurrent call runs on its
  // caller alone.
  void parallel_for(int64_t begin, int64_t end, int64_t grain, Body body, void* ctx);
  int threads() const { return threads_.load(std::memory_order_relaxed); }
  void set_threads(int threads);  // the caller included; at least 1

  // A forked child has the caller's thread only: helpers start again at its first loop.
  void before_fork() { owner_.lock(); }
  void after_fork_in_parent() { owner_.unlock(); }
  void after_fork_in_child();

 private:
  void start_helpers(int helpers);
  void help(int index);
  void work() noexcept;
  void publish();
  void wait_for_helpers();

  std::atomic<int> threads_;
  std::mutex owner_;  // one loop at a time
  int started_ = 0;  // helpers

  // The loop under way.
  Body body_ = nullptr;
  void* ctx_ = nullptr;
  int64_t end_ = 0, chunk_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  // Low bits: helpers inside the loop; kOpen: helpers may enter.
  alignas(64) std::atomic<uint32_t> members_{0};
  // Counts loops: helpers poll it, and sleep on it.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace npu::sim
