// The memory of one simulated device: a capacity in bytes, and a range of addresses that is its alone.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace npu::sim {

class DeviceMemory {
 public:
  // Reserves addresses only; host memory is used when it is first written. Throws std::bad_alloc without address space.
  // Checked memory (NPU_DEBUG=memory) is closed outside kernels; what is mapped may exceed the capacity, since fences take
  // room that tensors do not.
  DeviceMemory(size_t capacity, bool huge_pages, bool checked);

  // Sizes are multiples of NPU_MEMORY_GRANULE, addresses lie on it. nullptr: the capacity is used up.
  void* map(size_t bytes);
  void unmap(void* address, size_t bytes);
  // The range reads as zero from now on, without being touched.
  void discard(void* address, size_t bytes);
  // What is mapped gives its memory up, and keeps its addresses. An access to it is a fault of the process.
  void release(void* address, size_t bytes);
  bool restore(void* address, size_t bytes);  // false: the capacity is used up

  bool contains(const void* address) const { return size_t(static_cast<const char*>(address) - base_) < span_; }
  char* base() const { return base_; }
  size_t span() const { return span_; }
  size_t capacity() const { return capacity_; }
  size_t free();
  std::mutex& mutex() { return mutex_; }

 private:
  std::map<char*, size_t>::iterator first_hole(size_t bytes);
  void add_hole(char* address, size_t bytes);

  std::mutex mutex_;
  std::map<char*, size_t> holes_;  // unmapped ranges by address
  char* base_ = nullptr;
  size_t span_ = 0;
  size_t capacity_ = 0;
  size_t mapped_ = 0;
  bool huge_pages_ = false;
  bool checked_ = false;
};

}  // namespace npu::sim
