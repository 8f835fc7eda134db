// What the caching allocator keeps: slabs, blocks, pools. Only for its own files.
#pragma once

#include <algorithm>
#include <optional>

#include "runtime/caching_allocator.h"

namespace npu {

constexpr unsigned kSizeClasses = 72;

// A granule cut into equal slots.
struct CachingAllocator::Slab {
  char* address;
  Pool* pool;
  unsigned size_class;
  size_t slot;
  std::vector<uint32_t> free_slots;
  std::vector<uint32_t> requested;  // by slot; 0: it is free
  uint32_t index_of(const void* at) const { return uint32_t(size_t(static_cast<const char*>(at) - address) / slot); }
  // Bytes that were asked for, 0 for what is not the start of a slot in use.
  uint32_t requested_at(const void* at) const {
    const uint32_t index = index_of(at);
    return at == address + index * slot ? requested[index] : 0;
  }
  size_t live() const { return NPU_MEMORY_GRANULE / slot - free_slots.size(); }
};

// A range of mapped memory above the slot sizes; neighbours of the same mapping are linked.
struct CachingAllocator::Block {
  char* address;
  size_t size;
  Pool* pool;
  char* data = nullptr;  // the tensor's: the address, but where there are fences
  size_t counted = 0;
  size_t requested = 0;
  bool used = false;
  bool is_fenced = false;
  bool untouched = true;
  Block* previous = nullptr;
  Block* next = nullptr;
};

struct CachingAllocator::Pool {
  PoolId id;
  std::array<std::vector<Slab*>, kSizeClasses> open;  // slabs with free slots, by size class
  std::unordered_set<Slab*> slabs;
  std::set<Block*, BySize> free;
  Block* last_freed = nullptr;  // not merged with its neighbours yet: most often it is asked for again at once
  std::optional<std::vector<std::pair<char*, size_t>>> asleep = std::nullopt;  // the ranges that the driver has got back
};

using c10::CachingAllocator::StatType;

template <class Stats>
void add(Stats& stat, bool small, size_t amount) {
  stat[size_t(StatType::AGGREGATE)].increase(amount);
  stat[size_t(small ? StatType::SMALL_POOL : StatType::LARGE_POOL)].increase(amount);
}

template <class Stats>
void subtract(Stats& stat, bool small, size_t amount) {
  stat[size_t(StatType::AGGREGATE)].decrease(amount);
  stat[size_t(small ? StatType::SMALL_POOL : StatType::LARGE_POOL)].decrease(amount);
}

}  // namespace npu
