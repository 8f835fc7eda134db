#include "simulator/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "include/npu_driver.h"
#include "simulator/memory_check.h"

namespace npu::sim {
namespace {

// Addresses cost nothing: four times the capacity leaves a hole of any size that the capacity still allows, however
// the mapped ranges are scattered in practice.
constexpr size_t kSpanFactor = 4;

// Huge pages read 10 to 15 % faster but are five times dearer to touch first. A process that uses little memory (a
// test, a tool) keeps to small pages; beyond this much, weights and caches are being loaded.
constexpr size_t kHugePagesFrom = size_t(64) << 20;

}  // namespace

DeviceMemory::DeviceMemory(size_t capacity, bool huge_pages, bool checked)
    : span_(capacity * kSpanFactor), capacity_(capacity), huge_pages_(huge_pages && !checked), checked_(checked) {
  void* range = mmap(nullptr, span_ + NPU_MEMORY_GRANULE, checked ? PROT_NONE : PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) throw std::bad_alloc();
  const size_t first = (reinterpret_cast<size_t>(range) + NPU_MEMORY_GRANULE - 1) & ~(NPU_MEMORY_GRANULE - 1);
  base_ = reinterpret_cast<char*>(first);
  holes_[base_] = span_;
}

void* DeviceMemory::map(size_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes == 0 || bytes > (checked_ ? span_ : capacity_) - mapped_) return nullptr;
  auto hole = first_hole(bytes);
  if (hole == holes_.end()) return nullptr;
  char* address = hole->first;
  const size_t rest = hole->second - bytes;
  holes_.erase(hole);
  if (rest) holes_[address + bytes] = rest;
  mapped_ += bytes;
  if (huge_pages_ && mapped_ > kHugePagesFrom) madvise(address, bytes, MADV_HUGEPAGE);
  if (checked_) {
    memory_check::reopen_pages(address, bytes);
    memory_check::extend(base_, address + bytes);
  }
  return address;
}

void DeviceMemory::unmap(void* address, size_t bytes) {
  std::lock_guard lock(mutex_);
  madvise(address, bytes, MADV_DONTNEED);
  if (huge_pages_) madvise(address, bytes, MADV_NOHUGEPAGE);
  if (checked_) memory_check::close_pages(static_cast<char*>(address), bytes);
  add_hole(static_cast<char*>(address), bytes);
  mapped_ -= bytes;
}

void DeviceMemory::discard(void* address, size_t bytes) { madvise(address, bytes, MADV_DONTNEED); }

void DeviceMemory::release(void* address, size_t bytes) {
  std::lock_guard lock(mutex_);
  madvise(address, bytes, MADV_DONTNEED);
  if (!checked_) mprotect(address, bytes, PROT_NONE);  // checked memory is opened and closed as a whole
  mapped_ -= bytes;
}

bool DeviceMemory::restore(void* address, size_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes > (checked_ ? span_ : capacity_) - mapped_) return false;
  if (!checked_ && mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  mapped_ += bytes;
  return true;
}

size_t DeviceMemory::free() {
  std::lock_guard lock(mutex_);
  return capacity_ - std::min(mapped_, capacity_);
}

std::map<char*, size_t>::iterator DeviceMemory::first_hole(size_t bytes) {
  return std::find_if(holes_.begin(), holes_.end(), [bytes](const auto& hole) { return hole.second >= bytes; });
}

void DeviceMemory::add_hole(char* address, size_t bytes) {
  auto next = holes_.lower_bound(address);
  if (next != holes_.end() && address + bytes == next->first) {
    bytes += next->second;
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == address) {
      previous->second += bytes;
      return;
    }
  }
  holes_[address] = bytes;
}

}  // namespace npu::sim
