// The device's cores: loops shared out over the threads of one process, on a machine that may belong to others as well.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace npu::sim {

// Each thread has a share of a loop, the same one in every loop of that size: it finds its part of the weights in its own caches, and in
// the memory that it touched first. It takes the share piece by piece, and then pieces that are left of others' shares. So nobody waits
// for a thread whose core a neighbour has taken, but for a piece that it has begun; and nobody spins for it: a thread polls for its next
// loop for some microseconds, and then sleeps in the kernel. (OpenMP's spinning barrier was 10x slower there.)
//
// What a loop costs must not grow with the square of the threads: no word is written by all of them. A thread is called on a line of its
// own, counts the pieces of its share on another, and says there that it has left. A loop with less work than threads calls fewer.
//
// A pool lives as long as the process.
class ThreadPool {
 public:
  using Body = void (*)(void* ctx, int64_t begin, int64_t end);

  static constexpr int kMostThreads = 4096;

  // Helpers stay on the processors of a memory node each, in proportion; with one node, or none, they go where the system sends them.
  explicit ThreadPool(int threads, std::vector<std::vector<int>> nodes = {});

  // Runs body, which must not throw, over [begin, end) in pieces of at least grain. A nested or concurrent call runs on its
  // caller alone.
  void parallel_for(int64_t begin, int64_t end, int64_t grain, Body body, void* ctx);
  int threads() const { return threads_.load(std::memory_order_relaxed); }
  void set_threads(int threads);  // the caller included; from 1 to kMostThreads

  // A forked child has the caller's thread only: helpers start again at its first loop.
  void before_fork() { owner_.lock(); }
  void after_fork_in_parent() { owner_.unlock(); }
  void after_fork_in_child();

 private:
  struct Place;
  struct Loop;

  void start_helpers(int helpers);
  void help(int index);
  bool wait_for_call(Place& place, uint64_t last);
  void publish(const Loop& loop);
  void work(const Loop& loop, int share) noexcept;
  void wake(const Loop& loop, int share);
  void stay_beside_memory(int index, int threads) const;

  std::atomic<int> threads_;
  std::mutex owner_;  // one loop at a time
  int started_ = 0;   // helpers
  Place* const places_;  // one a thread, the caller's first
  const std::vector<std::vector<int>> nodes_;

  uint64_t number_ = 0;  // of the last loop
  alignas(128) std::atomic<int> sleepers_{0};
};

}  // namespace npu::sim
