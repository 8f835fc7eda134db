#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <sstream>

#include "config/config.h"
#include "runtime/caching_allocator_parts.h"
#include "runtime/device.h"
#include "runtime/faults.h"
#include "runtime/fences.h"

namespace npu {
namespace {

constexpr size_t kAlignment = 512;                // what a large block is counted in
constexpr size_t kLargestSlot = size_t(512) << 10;
constexpr size_t kBlockStep = size_t(64) << 10;   // what large blocks are cut in
constexpr size_t kLeastRemainder = size_t(512) << 10;

constexpr size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

// 512-byte steps to 4 KiB, then eight steps to each doubling.
unsigned size_class(size_t bytes, size_t* slot) {
  if (bytes <= 4096) {
    *slot = round_up(bytes, 512);
    return unsigned(*slot / 512);
  }
  const unsigned power = unsigned(std::bit_width(bytes - 1)) - 1;
  const size_t step = size_t(1) << (power - 3);
  *slot = round_up(bytes, step);
  return 8 + (power - 12) * 8 + unsigned((*slot - (size_t(1) << power)) / step);
}

}  // namespace

bool CachingAllocator::BySize::operator()(const Block* a, const Block* b) const {
  return a->size != b->size ? a->size < b->size : a->address < b->address;
}

CachingAllocator::CachingAllocator(c10::DeviceIndex device) : device_(device), fenced_(config().check_memory) {
  size_t free = 0;
  check(driver().memory_info(device, &free, &limit_));
  const auto [base, span] = detail::open_range(device);
  base_ = base;
  slabs_.resize(span / NPU_MEMORY_GRANULE);
  default_pool_ = &pool(kDefaultPool);
}

void* CachingAllocator::allocate(size_t bytes, PoolId id) {
  if (bytes == 0) return nullptr;
  void* address = is_watched() ? take_watched(bytes, id) : take(bytes, id);
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) report(address, int64_t(size_of(address)));
  return address;
}

void CachingAllocator::free(void* address) {
  if (C10_LIKELY(!c10::memoryProfilingEnabled())) return give_back(address);
  const auto bytes = int64_t(size_of(address));
  give_back(address);
  report(address, -bytes);
}

void* CachingAllocator::take_watched(size_t bytes, PoolId id) {
  if (const auto fault = meet_allocation_faults(device_)) {
    std::lock_guard lock(mutex_);
    out_of_memory(bytes, " Fault on demand '" + *fault + "', of NPU_DEBUG or torch.npu.faults.");
  }
  void* address = take(bytes, id);
  note_allocation(address);
  return address;
}

void* CachingAllocator::take(size_t bytes, PoolId id) {
  std::lock_guard lock(mutex_);
  if (bytes > slabs_.size() * NPU_MEMORY_GRANULE) out_of_memory(bytes);  // sums of larger ones could overflow
  if (C10_UNLIKELY(uses_.has_deferred())) settle_uses();
  Pool& from = id == kDefaultPool ? *default_pool_ : pool(id);
  TORCH_CHECK(!from.asleep, "npu: the memory pool ", id, " is asleep: resume it before anything is allocated from it");
  return bytes <= kLargestSlot && !fenced_ ? allocate_small(bytes, from) : allocate_large(bytes, from);
}

void CachingAllocator::note_use(void* address, StreamName stream) {
  std::lock_guard lock(mutex_);
  const Slab* slab = slab_at(address);
  if ((slab && slab->requested_at(address)) || block_at(address)) uses_.note(address, stream);
}

void CachingAllocator::give_back(void* address) {
  std::lock_guard lock(mutex_);
  if (C10_LIKELY(!uses_.defer(address))) make_free(address);
}

void CachingAllocator::settle_uses() {
  for (void* address : uses_.take_done()) make_free(address);
}

void CachingAllocator::make_free(void* address) {
  if (Slab* slab = slab_at(address); slab && slab->requested_at(address)) return free_small(slab, address);
  Block* block = block_at(address);
  TORCH_CHECK_VALUE(block, "npu: ", address, " is not the address of memory in use: it was freed before, or never allocated");
  free_large(block);
}

// To a profile with profile_memory=True.
void CachingAllocator::report(void* address, int64_t bytes) {
  const auto now = stats();
  const auto all = size_t(StatType::AGGREGATE);
  c10::reportMemoryUsageToProfiler(address, bytes, size_t(now.allocated_bytes[all].current),
                                   size_t(now.reserved_bytes[all].current), c10::Device(kNpu, device_));
}

void* CachingAllocator::allocate_small(size_t bytes, Pool& pool) {
  size_t slot = 0;
  const unsigned cls = size_class(bytes, &slot);
  auto& open = pool.open[cls];
  Slab* slab = open.empty() ? new_slab(cls, slot, pool) : open.back();
  const uint32_t index = slab->free_slots.back();
  slab->free_slots.pop_back();
  if (slab->free_slots.empty()) open.pop_back();
  slab->requested[index] = uint32_t(bytes);
  count(slot, bytes, /*small=*/true, /*allocated=*/true);
  return slab->address + size_t(index) * slot;
}

void CachingAllocator::free_small(Slab* slab, void* address) {
  const uint32_t index = slab->index_of(address);
  if (slab->free_slots.empty()) slab->pool->open[slab->size_class].push_back(slab);
  slab->free_slots.push_back(index);
  count(slab->slot, std::exchange(slab->requested[index], 0), /*small=*/true, /*allocated=*/false);
}

CachingAllocator::Slab* CachingAllocator::new_slab(unsigned cls, size_t slot, Pool& pool) {
  char* address = static_cast<char*>(map(NPU_MEMORY_GRANULE));
  if (!address) out_of_memory(slot);
  auto* slab = new Slab{address, &pool, cls, slot, {}, {}};
  const size_t slots = NPU_MEMORY_GRANULE / slot;
  slab->requested.resize(slots);
  for (size_t i = slots; i-- > 0;) slab->free_slots.push_back(uint32_t(i));  // lowest address first
  slab_at(address) = slab;
  pool.slabs.insert(slab);
  pool.open[cls].push_back(slab);
  add(stats_.segment, true, 1);
  count_reserved(NPU_MEMORY_GRANULE, true, /*taken=*/true);
  return slab;
}

void* CachingAllocator::allocate_large(size_t bytes, Pool& pool) {
  const bool small = bytes <= kLargestSlot;  // only where there are no slabs
  size_t counted = round_up(bytes, kAlignment);
  if (small) size_class(bytes, &counted);
  const size_t size = fenced_ ? fences::block_size(bytes) : round_up(bytes, kBlockStep);
  if (fenced_ && !is_within_limit(counted)) out_of_memory(bytes);
  Block* block = take_last_freed(pool, size);
  if (!block) block = take_free(pool, size, bytes);
  if (!block) block = new_block(size, pool);
  if (!block) out_of_memory(bytes);
  if (block->size - size >= (fenced_ ? fences::kPage : kLeastRemainder)) split(block, size);
  block->used = true;
  block->requested = bytes;
  block->counted = counted;
  block->data = block->address;
  if (fenced_) fence(block);
  blocks_[block->data] = block;
  count(counted, bytes, small, /*allocated=*/true);
  return block->data;
}

// The block that was freed last, when it is of this size; otherwise it joins the free list.
CachingAllocator::Block* CachingAllocator::take_last_freed(Pool& pool, size_t size) {
  if (pool.last_freed && pool.last_freed->size == size) return std::exchange(pool.last_freed, nullptr);
  settle(pool);
  return nullptr;
}

// Puts the block that was freed last into the free list, where all others are.
void CachingAllocator::settle(Pool& pool) {
  Block* block = std::exchange(pool.last_freed, nullptr);
  if (!block) return;
  block->used = false;
  pool.free.insert(merge_with_neighbours(block));
}

// Out of the free list; nullptr: there is none that fits.
CachingAllocator::Block* CachingAllocator::take_free(Pool& pool, size_t size, size_t bytes) {
  Block key{nullptr, size, nullptr};
  auto fit = pool.free.lower_bound(&key);
  if (keeps_layout(pool)) {
    auto is_new_or_same = [&](Block* block) { return !block->requested || (block->size == size && block->requested == bytes); };
    fit = std::find_if(fit, pool.free.end(), is_new_or_same);
  }
  if (fit == pool.free.end()) return nullptr;
  Block* block = *fit;
  pool.free.erase(fit);
  return block;
}

void CachingAllocator::free_large(Block* block) {
  blocks_.erase(block->data);
  if (fenced_) unfence(block);
  count(block->counted, block->requested, /*small=*/block->requested <= kLargestSlot, /*allocated=*/false);
  block->untouched = false;
  if (!fenced_) {
    settle(*block->pool);
    block->pool->last_freed = block;
    return;
  }
  block->used = false;
  if (!keeps_layout(*block->pool)) {
    close(block);
    block = merge_with_neighbours(block);
  }
  block->pool->free.insert(block);
}

CachingAllocator::Block* CachingAllocator::new_block(size_t bytes, Pool& pool) {
  const size_t size = round_up(bytes, NPU_MEMORY_GRANULE);
  char* address = static_cast<char*>(map(size));
  if (!address) return nullptr;
  add(stats_.segment, false, 1);
  count_reserved(size, false, /*taken=*/true);
  return new Block{address, size, &pool};
}

// Cuts the tail off a block that is not in the free list, and puts it there.
void CachingAllocator::split(Block* block, size_t bytes) {
  auto* tail = new Block{block->address + bytes, block->size - bytes, block->pool};
  tail->untouched = block->untouched;
  tail->previous = block;
  tail->next = block->next;
  if (tail->next) tail->next->previous = tail;
  block->next = tail;
  block->size = bytes;
  if (fenced_) close(tail);
  tail->pool->free.insert(tail);
}

CachingAllocator::Block* CachingAllocator::merge_with_neighbours(Block* block) {
  auto absorb = [this](Block* left, Block* right) {
    left->size += right->size;
    left->untouched = left->untouched && right->untouched;
    left->next = right->next;
    if (left->next) left->next->previous = left;
    delete right;
  };
  Block* next = block->next;
  if (next && !next->used && next->pool == block->pool) {
    next->pool->free.erase(next);
    absorb(block, next);
  }
  Block* previous = block->previous;
  if (previous && !previous->used && previous->pool == block->pool) {
    previous->pool->free.erase(previous);
    absorb(previous, block);
    return previous;
  }
  return block;
}

// Fresh memory; when there is none left, what is cached is given back first, and what streams still use waited for.
void* CachingAllocator::map(size_t bytes) {
  void* address = nullptr;
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (fenced_ || is_within_limit(bytes)) {
      const npu_status status = driver().memory_map(device_, bytes, &address);
      if (status == NPU_OK) {
        check_mapped(address, bytes);
        stats_.num_device_alloc++;
        return address;
      }
      if (status != NPU_ERROR_OUT_OF_MEMORY) check(status);
      if (attempt == 1 && is_of_a_vendor()) out_of_memory(bytes, " The driver: " + last_error(status));
    }
    if (attempt == 0) {
      stats_.num_alloc_retries++;
      uses_.wait();
      settle_uses();
      for (auto& [id, pool] : pools_) release(*pool);
    }
  }
  return nullptr;
}

void CachingAllocator::check_mapped(const void* address, size_t bytes) const {
  const size_t place = size_t(static_cast<const char*>(address) - base_), span = slabs_.size() * NPU_MEMORY_GRANULE;
  if (C10_LIKELY(place % NPU_MEMORY_GRANULE == 0 && place < span && bytes <= span - place)) return;
  std::ostringstream what;
  what << "whole granules (2 MiB) of memory_range(), not " << bytes << " bytes at " << address;
  detail::refuse_answer("memory_map", what.str());
}

bool CachingAllocator::is_within_limit(size_t bytes) const {
  return size_t(stats_.reserved_bytes[size_t(StatType::AGGREGATE)].current) + bytes <= limit_;
}

void CachingAllocator::unmap(char* address, size_t bytes) {
  check(driver().memory_unmap(device_, address, bytes));
  stats_.num_device_free++;
}

void CachingAllocator::release_cached(PoolId id) {
  std::lock_guard lock(mutex_);
  settle_uses();
  if (const auto found = pools_.find(id); found != pools_.end()) release(*found->second);
}

// But not where a replay writes to what is free, or finds fences in it.
void CachingAllocator::release(Pool& pool) {
  if (is_replayed(pool.id) || keeps_layout(pool) || pool.asleep) return;
  release_slabs(pool);
  release_blocks(pool);
}

void CachingAllocator::release_slabs(Pool& pool) {
  for (auto& open : pool.open) {
    std::erase_if(open, [&](Slab* slab) {
      if (slab->live()) return false;
      slab_at(slab->address) = nullptr;
      unmap(slab->address, NPU_MEMORY_GRANULE);
      subtract(stats_.segment, true, 1);
      count_reserved(NPU_MEMORY_GRANULE, true, /*taken=*/false);
      pool.slabs.erase(slab);
      delete slab;
      return true;
    });
  }
}

// Whole granules inside free blocks go back to the driver, wherever they lie: memory that is free is never held by a
// live neighbour.
void CachingAllocator::release_blocks(Pool& pool) {
  settle(pool);
  const std::vector<Block*> free(pool.free.begin(), pool.free.end());
  for (Block* block : free) {
    const size_t head = round_up(size_t(block->address), NPU_MEMORY_GRANULE) - size_t(block->address);
    if (block->size < head + NPU_MEMORY_GRANULE) continue;
    const size_t whole = (block->size - head) / NPU_MEMORY_GRANULE * NPU_MEMORY_GRANULE;
    const size_t tail = block->size - head - whole;
    pool.free.erase(block);
    unmap(block->address + head, whole);
    count_reserved(whole, false, /*taken=*/false);
    const bool left = head || block->previous, right = tail || block->next;  // what remains of the mapping
    if (left && right) add(stats_.segment, false, 1);
    if (!left && !right) subtract(stats_.segment, false, 1);
    if (tail) {
      auto* rest = new Block{block->address + head + whole, tail, &pool};
      rest->untouched = block->untouched;
      rest->next = block->next;
      if (rest->next) rest->next->previous = rest;
      pool.free.insert(rest);
    } else if (block->next) {
      block->next->previous = nullptr;
    }
    block->next = nullptr;
    block->size = head;
    if (head) {
      pool.free.insert(block);
    } else {
      if (block->previous) block->previous->next = nullptr;
      delete block;
    }
  }
}

void CachingAllocator::merge_pool(PoolId id) {
  std::lock_guard lock(mutex_);
  auto found = pools_.find(id);
  if (found == pools_.end() || id == kDefaultPool) return;
  Pool& dead = *found->second;
  settle(dead);
  for (Slab* slab : dead.slabs) slab->pool = default_pool_;
  default_pool_->slabs.insert(dead.slabs.begin(), dead.slabs.end());
  for (unsigned cls = 0; cls < kSizeClasses; ++cls) {
    auto& open = default_pool_->open[cls];
    open.insert(open.begin(), dead.open[cls].begin(), dead.open[cls].end());
  }
  for (auto& [address, block] : blocks_) {
    if (block->pool == &dead) block->pool = default_pool_;
  }
  for (Block* block : dead.free) {
    block->pool = default_pool_;
    if (fenced_) close(block);
    default_pool_->free.insert(block);
  }
  pools_.erase(found);
}

CachingAllocator::Slab*& CachingAllocator::slab_at(const void* address) {
  return slabs_[size_t(static_cast<const char*>(address) - base_) / NPU_MEMORY_GRANULE];
}

CachingAllocator::Block* CachingAllocator::block_at(const void* address) {
  auto found = blocks_.find(address);
  return found == blocks_.end() ? nullptr : found->second;
}

CachingAllocator::Pool& CachingAllocator::pool(PoolId id) {
  auto& entry = pools_[id];
  if (!entry) entry = std::make_unique<Pool>(Pool{id, {}, {}, {}});
  return *entry;
}

void CachingAllocator::count(size_t bytes, size_t requested, bool small, bool allocated) {
  auto update = [&](auto& stat, size_t amount) {
    if (allocated) {
      add(stat, small, amount);
    } else {
      subtract(stat, small, amount);
    }
  };
  update(stats_.allocation, 1);
  update(stats_.active, 1);
  update(stats_.allocated_bytes, bytes);
  update(stats_.active_bytes, bytes);
  update(stats_.requested_bytes, requested);
  if (fenced_) update(stats_.reserved_bytes, bytes);
}

// With fences, what is reserved is what tensors hold: nothing is cached for long, and fences take no memory to speak of.
void CachingAllocator::count_reserved(size_t bytes, bool small, bool taken) {
  if (fenced_) return;
  if (taken) {
    add(stats_.reserved_bytes, small, bytes);
  } else {
    subtract(stats_.reserved_bytes, small, bytes);
  }
}

}  // namespace npu
