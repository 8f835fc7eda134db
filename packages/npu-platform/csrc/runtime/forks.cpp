#include "runtime/forks.h"

#include <pthread.h>

#include <vector>

namespace npu {
namespace {

struct Held {
  std::mutex mutex;
  std::vector<std::mutex*> locks;
};

Held& held() {
  static auto* all = new Held;
  return *all;
}

void lock_all() {
  held().mutex.lock();
  for (std::mutex* lock : held().locks) lock->lock();
}

void unlock_all() {
  for (std::mutex* lock : held().locks) lock->unlock();
  held().mutex.unlock();
}

[[maybe_unused]] const int registered = pthread_atfork(lock_all, unlock_all, unlock_all);

}  // namespace

void hold_in_forks(std::mutex& mutex) {
  std::lock_guard lock(held().mutex);
  held().locks.push_back(&mutex);
}

}  // namespace npu
