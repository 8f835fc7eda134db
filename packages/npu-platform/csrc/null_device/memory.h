// The memory of one null device: addresses, which are given out and counted. All of it reads as zero.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace npu::null {

class Memory {
 public:
  explicit Memory(size_t capacity);  // throws std::bad_alloc without address space

  void* map(size_t bytes);  // whole granules; nullptr: the capacity is used up
  void unmap(void* address, size_t bytes);
  void discard(void* address, size_t bytes);
  void release(void* address, size_t bytes);  // what is mapped counts as free, and keeps its addresses
  bool restore(size_t bytes);                 // false: the capacity is used up

  char* base() const { return base_; }
  size_t span() const { return is_mapped_.size() * granule(); }
  size_t capacity() const { return capacity_; }
  size_t free();
  std::mutex& mutex() { return mutex_; }

 private:
  static size_t granule();

  std::mutex mutex_;
  std::vector<bool> is_mapped_;  // by granule
  char* base_ = nullptr;
  size_t capacity_ = 0;
  size_t mapped_ = 0;
};

}  // namespace npu::null
