// NPU_DEBUG=memory in the caching allocator: fences around tensors, closed pages where there are none.
#include <cstdio>

#include "runtime/caching_allocator_parts.h"
#include "runtime/fences.h"

namespace npu {

// A replay writes to what was freed during the capture, and must find the fences where they were: in a private pool such
// memory stays open, and is used again for the same size alone.
bool CachingAllocator::keeps_layout(const Pool& pool) const { return fenced_ && &pool != default_pool_; }

void CachingAllocator::close(Block* block) {
  block->is_fenced = false;
  driver().memory_check->close_pages(block->address, block->size);
}

void CachingAllocator::fence(Block* block) {
  const OpenMemory open("the allocator");
  char* end = block->address + block->size;
  driver().memory_check->reopen_pages(block->address, block->size);
  driver().memory_check->close_pages(end - fences::kPage, fences::kPage);
  block->is_fenced = true;
  block->data = fences::data_in(block->address, block->size, block->requested);
  fences::build(block->data, block->requested);
  driver().memory_check->remember(device_, block->address, end, block->data, block->requested);
}

void CachingAllocator::unfence(Block* block) {
  if (!block->pool->asleep) {
    const OpenMemory open("the allocator");
    check_fences(block);
    fences::poison(block->data, block->requested);
  }
  driver().memory_check->forget(block->address);
}

void CachingAllocator::check_fences(const Block* block) {
  auto where = fences::broken(block->data, block->requested);
  if (!where) return;
  char address[32];
  std::snprintf(address, sizeof address, "%p", static_cast<void*>(block->data));
  broken_ += (broken_.empty() ? "" : "; ") + *where + " of the tensor memory of " + std::to_string(block->requested) +
             " bytes at " + address + " on npu:" + std::to_string(int(device_));
}

std::string CachingAllocator::broken_fences() {
  std::lock_guard lock(mutex_);
  for_each_fenced([this](Block* block) {
    if (!block->pool->asleep) check_fences(block);
  });
  return std::exchange(broken_, {});
}

// What sleeps is closed in kernels, too, so that whoever uses it is named.
void CachingAllocator::close_all(Pool& pool) {
  for (const auto& [address, bytes] : *pool.asleep) driver().memory_check->close_pages(address, bytes);
}

void CachingAllocator::reopen_all(Pool& pool) {
  const OpenMemory open("the allocator");
  for_each_fenced([&pool](Block* block) {
    if (block->pool != &pool) return;
    char* end = block->address + block->size;
    driver().memory_check->reopen_pages(block->address, block->size);
    driver().memory_check->close_pages(end - fences::kPage, fences::kPage);
    fences::renew(block->data, block->requested);
  });
}

void CachingAllocator::renew_fences() {
  std::lock_guard lock(mutex_);
  const OpenMemory open("reset_device");
  for_each_fenced([](Block* block) {
    if (!block->pool->asleep) fences::renew(block->data, block->requested);
  });
}

template <class Visit>
void CachingAllocator::for_each_fenced(Visit visit) {
  for (auto& [data, block] : blocks_) visit(block);
  for (auto& [id, pool] : pools_) {
    for (Block* block : pool->free) {
      if (block->is_fenced) visit(block);
    }
  }
}

}  // namespace npu
