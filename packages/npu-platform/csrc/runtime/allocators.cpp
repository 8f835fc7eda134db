// The caching allocators of all devices, and who uses their private pools.
#include <ATen/Parallel.h>
#include <pthread.h>

#include <array>
#include <atomic>

#include "runtime/caching_allocator.h"
#include "runtime/device.h"
#include "runtime/generator.h"

namespace npu {
namespace {

std::array<std::atomic<CachingAllocator*>, NPU_MAX_DEVICES> allocators;
std::mutex creation;

struct Users {
  int all = 0;
  int graphs = 0;  // of them
};

struct PoolUsers {
  std::mutex mutex;  // taken under that of an allocator
  std::unordered_map<PoolId, Users> of;
};

PoolUsers& pool_users() {
  static auto* users = new PoolUsers;
  return *users;
}

void before_fork() {
  lock_default_generators();
  creation.lock();
  for (auto& entry : allocators) {
    if (auto* allocator = entry.load()) allocator->mutex().lock();
  }
  pool_users().mutex.lock();
}

void unlock_all() {
  pool_users().mutex.unlock();
  for (auto& entry : allocators) {
    if (auto* allocator = entry.load()) allocator->mutex().unlock();
  }
  creation.unlock();
  unlock_default_generators();
}

// libgomp's threads do not survive a fork, and a parallel region of a CPU kernel would wait for them for ever: as in the
// workers of a DataLoader, CPU kernels are serial in the child. The device's own pool starts again by itself.
void after_fork_in_child() {
  unlock_all();
  at::set_num_threads(1);
}

}  // namespace

CachingAllocator& CachingAllocator::of(c10::DeviceIndex device) {
  if (size_t(device) < allocators.size()) {
    if (auto* allocator = allocators[size_t(device)].load(std::memory_order_acquire)) return *allocator;
  }
  check_device(device);
  std::lock_guard lock(creation);
  auto& entry = allocators[size_t(device)];
  if (!entry.load()) {
    static const int forks = pthread_atfork(before_fork, unlock_all, after_fork_in_child);
    TORCH_CHECK(forks == 0, "npu: pthread_atfork failed");
    entry.store(new CachingAllocator(device), std::memory_order_release);
  }
  return *entry.load();
}

PoolId new_pool_id() {
  static std::atomic<PoolId> next{1};
  return next.fetch_add(1);
}

void retain_pool(PoolId pool, PoolUser user) {
  auto& users = pool_users();
  std::lock_guard lock(users.mutex);
  Users& here = users.of[pool];
  here.all++;
  here.graphs += user == PoolUser::graph;
}

void release_pool(PoolId pool, PoolUser user) {
  {
    auto& users = pool_users();
    std::lock_guard lock(users.mutex);
    Users& here = users.of[pool];
    here.graphs -= user == PoolUser::graph;
    if (--here.all > 0) return;
    users.of.erase(pool);
  }
  for (auto& entry : allocators) {
    if (auto* allocator = entry.load()) allocator->merge_pool(pool);
  }
}

int count_pool_users(PoolId pool) {
  auto& users = pool_users();
  std::lock_guard lock(users.mutex);
  const auto found = users.of.find(pool);
  return found == users.of.end() ? 0 : found->second.all;
}

bool is_replayed(PoolId pool) {
  auto& users = pool_users();
  std::lock_guard lock(users.mutex);
  const auto found = users.of.find(pool);
  return found != users.of.end() && found->second.graphs > 0;
}

void release_cached_of_all(PoolId pool) {
  for (auto& entry : allocators) {
    if (auto* allocator = entry.load()) allocator->release_cached(pool);
  }
}

void free_device_memory(void* address) {
  if (address) CachingAllocator::of(device_of(address)).free(address);
}

}  // namespace npu
