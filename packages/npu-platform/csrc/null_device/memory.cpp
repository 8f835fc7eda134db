#include "null_device/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

#include "include/npu_driver.h"

namespace npu::null {
namespace {

// Addresses cost nothing: with four times the capacity, scattered mappings leave a hole of any size in practice.
constexpr size_t kSpanFactor = 4;

}  // namespace

size_t Memory::granule() { return NPU_MEMORY_GRANULE; }

// A page that is only read is the host's page of zeros. What little is written to it all the same (by a collective, which
// brings the zeros of other ranks) takes up host memory as it does anywhere.
Memory::Memory(size_t capacity) : is_mapped_(capacity * kSpanFactor / granule()), capacity_(capacity) {
  void* range = mmap(nullptr, span() + granule(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) throw std::bad_alloc();
  base_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(range) + granule() - 1) & ~(granule() - 1));
}

void* Memory::map(size_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes > capacity_ - mapped_) return nullptr;
  const auto hole = std::search_n(is_mapped_.begin(), is_mapped_.end(), bytes / granule(), false);
  if (hole == is_mapped_.end()) return nullptr;
  std::fill_n(hole, bytes / granule(), true);
  mapped_ += bytes;
  return base_ + size_t(hole - is_mapped_.begin()) * granule();
}

void Memory::unmap(void* address, size_t bytes) {
  discard(address, bytes);
  std::lock_guard lock(mutex_);
  std::fill_n(is_mapped_.begin() + (static_cast<char*>(address) - base_) / ptrdiff_t(granule()), bytes / granule(), false);
  mapped_ -= bytes;
}

void Memory::discard(void* address, size_t bytes) { madvise(address, bytes, MADV_DONTNEED); }

void Memory::release(void* address, size_t bytes) {
  discard(address, bytes);
  std::lock_guard lock(mutex_);
  mapped_ -= bytes;
}

bool Memory::restore(size_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes > capacity_ - mapped_) return false;
  mapped_ += bytes;
  return true;
}

size_t Memory::free() {
  std::lock_guard lock(mutex_);
  return capacity_ - mapped_;
}

}  // namespace npu::null
