#include <cstdlib>
#include <stdexcept>
#include <string>

#include "dispatch/parallel.h"

namespace npu_ops {
namespace {

struct Buffer {
  void* data = nullptr;
  size_t capacity = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

void* thread_scratch(int slot, size_t bytes) {
  static thread_local Buffer buffers[kScratchSlots];
  Buffer& b = buffers[slot];
  if (b.capacity < bytes) {
    std::free(b.data);
    size_t rounded = (bytes + bytes / 4 + 4095) & ~size_t{4095};
    b.data = std::aligned_alloc(4096, rounded);
    b.capacity = b.data ? rounded : 0;
    if (!b.data) {
      throw std::runtime_error("npu_ops: out of memory: a kernel found no " + std::to_string(bytes) +
                               " bytes of scratch; free host memory, or give it fewer rows at once.");
    }
  }
  return b.data;
}

}  // namespace npu_ops
