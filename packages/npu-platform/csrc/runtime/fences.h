// NPU_DEBUG=memory: how an allocation lies in its pages, so that what is written or read beside it is found.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace npu {

// Opens the memory of all devices until it ends, where it is checked. `name`, of what reads it, must outlive the scope.
class OpenMemory {
 public:
  explicit OpenMemory(const char* name);
  ~OpenMemory();
  OpenMemory(const OpenMemory&) = delete;
  OpenMemory& operator=(const OpenMemory&) = delete;

 private:
  int scope_;
};

}  // namespace npu

namespace npu::fences {

constexpr size_t kPage = 4096;

// A block is: a zone with a pattern (256 bytes and more), the tensor, the rest of its last 64 bytes with the same pattern,
// and a page that is closed. A read or write past the end meets the page at once; a write closer by changes the pattern.
size_t block_size(size_t bytes);
char* data_in(char* block, size_t size, size_t bytes);

void build(char* data, size_t bytes);  // writes the patterns, and 0xDB into what is not too large
void renew(char* data, size_t bytes);  // writes the patterns
// Where the pattern has changed, in words; it is written anew.
std::optional<std::string> broken(char* data, size_t bytes);
void poison(char* address, size_t bytes);

}  // namespace npu::fences
