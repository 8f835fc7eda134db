// What is known of device memory: what lies at an address, what is in use, the statistics, the error when there is none left.
#include "runtime/caching_allocator_parts.h"

namespace npu {

size_t CachingAllocator::size_of(const void* address) {
  std::lock_guard lock(mutex_);
  if (Slab* slab = slab_at(address)) return slab->requested_at(address) ? slab->slot : 0;
  Block* block = block_at(address);
  return block ? block->counted : 0;
}

size_t CachingAllocator::requested_of(const void* address) {
  std::lock_guard lock(mutex_);
  if (Slab* slab = slab_at(address)) return slab->requested_at(address);
  Block* block = block_at(address);
  return block ? block->requested : 0;
}

std::vector<std::pair<void*, size_t>> CachingAllocator::live() {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<void*, size_t>> all;
  for (auto& [id, pool] : pools_) {
    for (Slab* slab : pool->slabs) {
      for (uint32_t index = 0; index < slab->requested.size(); ++index) {
        if (slab->requested[index]) all.emplace_back(slab->address + index * slab->slot, slab->requested[index]);
      }
    }
  }
  for (auto& [data, block] : blocks_) all.emplace_back(block->data, block->requested);
  std::sort(all.begin(), all.end());
  return all;
}

PoolId CachingAllocator::pool_of(const void* address) {
  std::lock_guard lock(mutex_);
  if (Slab* slab = slab_at(address)) return slab->pool->id;
  Block* block = block_at(address);
  return block ? block->pool->id : kDefaultPool;
}

bool CachingAllocator::take_untouched(void* address) {
  std::lock_guard lock(mutex_);
  Block* block = slab_at(address) ? nullptr : block_at(address);
  return block && std::exchange(block->untouched, false);
}

void CachingAllocator::set_limit(size_t bytes) {
  std::lock_guard lock(mutex_);
  limit_ = bytes;
}

size_t CachingAllocator::limit() {
  std::lock_guard lock(mutex_);
  return limit_;
}

void CachingAllocator::out_of_memory(size_t bytes, const std::string& fault) {
  using c10::CachingAllocator::format_size;
  stats_.num_ooms++;
  const auto reserved = size_t(stats_.reserved_bytes[size_t(StatType::AGGREGATE)].current);
  const auto allocated = size_t(stats_.allocated_bytes[size_t(StatType::AGGREGATE)].current);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", format_size(bytes), ". NPU ",
                   int(device_), " has a total capacity of ", format_size(limit_), " of which ",
                   format_size(limit_ > reserved ? limit_ - reserved : 0), " is free. Of the reserved memory ",
                   format_size(allocated), " is allocated by tensors and ", format_size(reserved > allocated ? reserved - allocated : 0),
                   " is cached or held by graphs. Free tensors", is_of_a_vendor() ? " or" : ",", " use smaller batches",
                   is_of_a_vendor() ? "." : ", or raise NPU_SIMULATOR_MEMORY.", fault);
}

c10::CachingDeviceAllocator::DeviceStats CachingAllocator::stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

namespace {

template <class Change>
void for_each_stat(c10::CachingDeviceAllocator::DeviceStats& stats, Change change) {
  for (auto* array : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                      &stats.active_bytes, &stats.requested_bytes}) {
    for (auto& stat : *array) change(stat);
  }
}

}  // namespace

void CachingAllocator::reset_peak_stats() {
  std::lock_guard lock(mutex_);
  for_each_stat(stats_, [](auto& stat) { stat.reset_peak(); });
}

void CachingAllocator::reset_accumulated_stats() {
  std::lock_guard lock(mutex_);
  for_each_stat(stats_, [](auto& stat) { stat.reset_accumulated(); });
  stats_.num_alloc_retries = stats_.num_ooms = stats_.num_device_alloc = stats_.num_device_free = 0;
}

std::vector<c10::CachingDeviceAllocator::SegmentInfo> CachingAllocator::snapshot() {
  std::lock_guard lock(mutex_);
  std::vector<c10::CachingDeviceAllocator::SegmentInfo> segments;
  auto segment = [&](const char* address, size_t size, size_t used, size_t requested, PoolId pool, bool large) {
    auto& info = segments.emplace_back();
    info.device = device_;
    info.address = size_t(address);
    info.total_size = size;
    info.allocated_size = info.active_size = used;
    info.requested_size = requested;
    info.is_large = large;
    info.owner_private_pool_id = {0, pool};
  };
  for (auto& [id, pool] : pools_) {
    for (Slab* slab : pool->slabs) {
      segment(slab->address, NPU_MEMORY_GRANULE, slab->live() * slab->slot, slab->live() * slab->slot, id, false);
    }
    settle(*pool);
    for (Block* block : pool->free) segment(block->address, block->size, 0, 0, id, true);
  }
  for (auto& [address, block] : blocks_) {
    segment(block->address, block->size, block->counted, block->requested, block->pool->id, true);
  }
  return segments;
}

}  // namespace npu
