// What loops on the pool of threads cost on this machine, and what they are made of. Answers, one line each:
//   atomics                              nanoseconds: of an atomic addition on a line that the core has, of a line's way between cores,
//                                        of waking a thread that sleeps
//   loops POOL THREADS GRAINS NS GAP REPEATS    nanoseconds of each of REPEATS loops of GRAINS grains that take NS each, GAP ns apart,
//                                        on the pool "one_counter" or "shares"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "config/processors.h"
#include "one_counter_pool.h"
#include "simulator/thread_pool.h"

namespace {

using Clock = std::chrono::steady_clock;

double nanoseconds(Clock::time_point from) { return std::chrono::duration<double, std::nano>(Clock::now() - from).count(); }

double median(std::vector<double> of) {
  std::nth_element(of.begin(), of.begin() + long(of.size() / 2), of.end());
  return of[of.size() / 2];
}

double own_line() {
  std::atomic<int64_t> word{0};
  std::vector<double> samples;
  for (int sample = 0; sample < 50; ++sample) {
    const auto began = Clock::now();
    for (int i = 0; i < 1000; ++i) word.fetch_add(1, std::memory_order_acq_rel);
    samples.push_back(nanoseconds(began) / 1000);
  }
  return median(samples);
}

// Two threads, on a core each, increase a word in turn: a turn is the line's way to the other core, and the load that saw it.
double line_between_cores() {
  constexpr int kTurns = 4000, kBothHaveBegun = 1000;
  const auto cores = npu::processors_allowed();
  std::vector<double> samples;
  for (int sample = 0; sample < 30; ++sample) {
    alignas(128) std::atomic<int> word{0};
    Clock::time_point began;
    auto play = [&](int me) {
      npu::stay_on({cores[size_t(me) % cores.size()]});
      for (int turn = me; turn < kTurns; turn += 2) {
        while (word.load(std::memory_order_acquire) != turn) {
        }
        word.fetch_add(1, std::memory_order_acq_rel);
        if (turn == kBothHaveBegun) began = Clock::now();
      }
    };
    std::thread other(play, 1), first(play, 0);
    first.join();
    samples.push_back(nanoseconds(began) / (kTurns - kBothHaveBegun));
    other.join();
  }
  return median(samples);
}

// From the call that wakes a thread to its return: what the waker pays.
double wake() {
  std::atomic<uint32_t> word{1};
  std::atomic<bool> over{false};
  std::thread sleeper([&] {
    while (!over) syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0);
  });
  std::vector<double> samples;
  for (int sample = 0; sample < 200; ++sample) {
    std::this_thread::sleep_for(std::chrono::microseconds(300));
    const auto began = Clock::now();
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    samples.push_back(nanoseconds(began));
  }
  over = true;
  word = 0;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
  sleeper.join();
  return median(samples);
}

void spend(double ns) {
  const auto began = Clock::now();
  while (nanoseconds(began) < ns) {
  }
}

template <class Pool>
void loops(int threads, int64_t grains, double ns, double gap, int repeats) {
  static std::map<int, Pool*> pools;  // whose threads never end
  if (!pools[threads]) pools[threads] = new Pool(threads);
  Pool& pool = *pools[threads];
  auto body = [](void* ns, int64_t begin, int64_t end) {
    if (*static_cast<double*>(ns) > 0) spend(*static_cast<double*>(ns) * double(end - begin));
  };
  for (int i = 0; i < repeats; ++i) {
    spend(gap);
    const auto began = Clock::now();
    pool.parallel_for(0, grains, 1, body, &ns);
    std::printf("%.0f ", nanoseconds(began));
  }
  std::printf("\n");
}

}  // namespace

int main() {
  for (std::string what; std::cin >> what; std::fflush(stdout)) {
    if (what == "atomics") {
      std::printf("%.2f %.2f %.0f\n", own_line(), line_between_cores(), wake());
      continue;
    }
    std::string pool;
    int threads = 0, repeats = 0;
    int64_t grains = 0;
    double ns = 0, gap = 0;
    std::cin >> pool >> threads >> grains >> ns >> gap >> repeats;
    (pool == "shares" ? loops<npu::sim::ThreadPool> : loops<OneCounterPool>)(threads, grains, ns, gap, repeats);
  }
}
