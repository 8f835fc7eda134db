// Pools that sleep: their memory is the driver's for a while, their addresses stay those of their tensors.
#include "runtime/caching_allocator_parts.h"

namespace npu {

std::vector<std::pair<void*, size_t>> CachingAllocator::live(PoolId id) {
  auto all = live();
  std::erase_if(all, [&](const auto& one) { return pool_of(one.first) != id; });
  return all;
}

bool CachingAllocator::sleeps(PoolId id) {
  std::lock_guard lock(mutex_);
  const auto found = pools_.find(id);
  return found != pools_.end() && found->second->asleep;
}

size_t CachingAllocator::suspend(PoolId id) {
  TORCH_CHECK(driver().memory_release, "npu: the driver '", driver().name, "' cannot take memory back and keep its addresses");
  TORCH_CHECK(id != kDefaultPool, "npu: the default pool cannot sleep: allocate what is to sleep in a MemPool");
  check(driver().device_synchronize(device_));
  std::lock_guard lock(mutex_);
  Pool& sleeper = pool(id);
  TORCH_CHECK(!sleeper.asleep, "npu: the memory pool ", id, " is asleep already: resume it first");
  release(sleeper);
  sleeper.asleep = mapped(sleeper);
  if (fenced_) close_all(sleeper);
  size_t given = 0;
  for (const auto& [address, bytes] : *sleeper.asleep) {
    check(driver().memory_release(device_, address, bytes));
    count_reserved(bytes, slab_at(address) != nullptr, /*taken=*/false);
    given += bytes;
  }
  return given;
}

size_t CachingAllocator::resume(PoolId id) {
  std::lock_guard lock(mutex_);
  Pool& sleeper = pool(id);
  TORCH_CHECK(sleeper.asleep, "npu: the memory pool ", id, " is not asleep");
  size_t taken = 0;
  for (const auto& [address, bytes] : *sleeper.asleep) taken += bytes;
  npu_status status = restore(*sleeper.asleep);
  if (status == NPU_ERROR_OUT_OF_MEMORY) {
    for (auto& [other, cached] : pools_) release(*cached);
    status = restore(*sleeper.asleep);
  }
  if (status == NPU_ERROR_OUT_OF_MEMORY) out_of_memory(taken, " A memory pool that sleeps asked for it, and sleeps on.");
  check(status);
  for (const auto& [address, bytes] : *sleeper.asleep) count_reserved(bytes, slab_at(address) != nullptr, /*taken=*/true);
  sleeper.asleep.reset();
  if (fenced_) reopen_all(sleeper);
  return taken;
}

// All of it or nothing.
npu_status CachingAllocator::restore(const std::vector<std::pair<char*, size_t>>& ranges) {
  size_t bytes = 0;
  for (const auto& range : ranges) bytes += range.second;
  if (!fenced_ && !is_within_limit(bytes)) return NPU_ERROR_OUT_OF_MEMORY;
  for (auto range = ranges.begin(); range != ranges.end(); ++range) {
    const npu_status status = driver().memory_restore(device_, range->first, range->second);
    if (status == NPU_OK) continue;
    while (range != ranges.begin()) {
      --range;
      check(driver().memory_release(device_, range->first, range->second));
    }
    return status;
  }
  return NPU_OK;
}

// The ranges that the pool has from the driver: its slabs, and each chain of blocks.
std::vector<std::pair<char*, size_t>> CachingAllocator::mapped(Pool& pool) {
  settle(pool);
  std::vector<std::pair<char*, size_t>> ranges;
  for (const Slab* slab : pool.slabs) ranges.emplace_back(slab->address, NPU_MEMORY_GRANULE);
  auto add_chain = [&ranges](const Block* first) {
    if (first->previous) return;
    size_t bytes = 0;
    for (const Block* block = first; block; block = block->next) bytes += block->size;
    ranges.emplace_back(first->address, bytes);
  };
  for (const auto& [data, block] : blocks_) {
    if (block->pool == &pool) add_chain(block);
  }
  for (const Block* block : pool.free) add_chain(block);
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

}  // namespace npu
